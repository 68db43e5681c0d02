"""Workers, servers and newcomers are killed while places and shards change hands, and not one bit changes."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.observed import ObservedEngine
from shoal.errors import Interrupted
from shoal.launch.control import request_scale
from shoal.launch.crew import Hand
from shoal.launch.local import LocalHost
from shoal.launch.owner import ZygoteProcess
from shoal.observe import Event
from shoal.spec import Cluster, Job

TASKS = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"
PLACES = 4
FEW, MANY = 8, 24
"""Rounds: where all tests must be quick, and where they need not."""
GUARD_S = 60.0


class Storm(ObservedEngine):
    """Asks for another number of workers, or of servers, and kills one of them, in turn, at any moment; then stops
    the run."""

    def __init__(
        self, zygote: ZygoteProcess, folder: Path, rounds: int, role: str = "worker", most: int = PLACES
    ) -> None:
        super().__init__(zygote)
        self.killed = 0
        self._folder, self._rounds = folder, rounds
        self._role, self._most = role, most
        self._random = random.Random(8)
        self._begin, self._scaled, self._over = threading.Event(), threading.Event(), threading.Event()
        self._stepped = threading.Event()

    def open(self, job: Job) -> LocalHost:
        host = super().open(job)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return host

    def on_event(self, event: Event) -> None:
        if event.kind == "steps":
            self._begin.set()
            self._stepped.set()
        elif event.kind == "scaled":
            self._scaled.set()

    def finish(self) -> None:
        self._over.set()
        self._begin.set()
        self._scaled.set()
        self._stepped.set()
        self._thread.join(GUARD_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        self._begin.wait(GUARD_S)
        try:
            for _ in range(self._rounds):
                if self._over.wait(self._random.uniform(0.0, 0.15)):
                    return
                self._ask_for(self._random.randint(1, self._most))
                if self._over.wait(self._random.uniform(0.0, 0.15)):
                    return
                self.signal(self._random.choice(self._living()), signal.SIGKILL)
                self.killed += 1
                if self._role == "server":  # Without any for long, nothing would ever move.
                    self._stepped.clear()
                    assert self._stepped.wait(GUARD_S), "no step was taken after a kill"
            if self._role == "worker":
                self._let_it_settle()
        finally:
            if not self._over.is_set():
                os.kill(os.getpid(), signal.SIGINT)  # also where this failed: the run has no other end

    def _ask_for(self, count: int) -> None:
        request_scale(self._folder, **{f"{self._role}s": count})

    def _let_it_settle(self) -> None:
        """Ask once more and kill nobody: on a busy host none of the numbers before may have been reached."""
        self._scaled.clear()
        self._ask_for(2)
        assert self._scaled.wait(GUARD_S), (
            "after the storm, the run did not come to the number of workers asked for"
        )

    def _living(self) -> list[Hand]:
        """Whom to choose from. For a moment all may be dead, and their successors not yet started."""
        deadline = time.monotonic() + GUARD_S
        while not (living := [hand for hand in self.running() if hand.role == self._role]):
            assert time.monotonic() < deadline, "nobody followed those who were killed"
            time.sleep(0.001)
        return living


def train(
    folder: Path,
    engine: ObservedEngine,
    steps: int,
    policy: str = "auto",
    strategy: str = "data",
    optimizer: str = "adamw",
) -> tuple[dict[str, Any], list[Event]]:
    folder.mkdir()
    job = Job(
        target=f"{TASKS}:mlp",
        args={"optimizer": optimizer, "clip": 1.0},
        strategy=strategy,
        cluster=Cluster(workers=PLACES, threads=1),
        overrides={"max_steps": steps, "epochs": steps, "evaluate_every": 5},
        run_dir=str(folder),
        options={"state": str(folder / "state.safetensors")},
        on_failure=policy,
        max_failures=MANY,
    )
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(engine, Storm):
            engine.on_event(event)

    try:
        engine.run(job, listen)
    except Interrupted:
        assert isinstance(engine, Storm)
    finally:
        if isinstance(engine, Storm):
            engine.finish()
    return next(e.values["results"] for e in events if e.kind == "done" and e.rank == 0), events


@pytest.mark.parametrize("rounds", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
@pytest.mark.parametrize("policy", ["replace", "shrink"])
def test_kills_while_places_change_hands(tmp_path: Path, zygote: ZygoteProcess, policy: str, rounds: int) -> None:
    storm = Storm(zygote, tmp_path / "stormy", rounds)
    stormy, events = train(tmp_path / "stormy", storm, 100_000, policy)
    calm, _ = train(tmp_path / "calm", ObservedEngine(zygote), stormy["steps"], policy)
    assert storm.killed == rounds
    for kind in ("lost", "replaced", "scaled"):
        assert any(event.kind == kind for event in events), f"nobody was {kind}"
    assert (stormy["digest"], stormy["state_digest"]) == (calm["digest"], calm["state_digest"])
    assert stormy["loss"] == calm["loss"]


@pytest.mark.parametrize(
    ("strategy", "policy", "optimizer", "rounds"),
    [
        ("average:every=7,outer=nesterov", "shrink", "adamw", FEW),
        ("average:every=3,with=ring", "replace", "muon_like", FEW),
        ("average:clients=8,share=0.5,partition=own,every=4,scaffold=on", "shrink", "momentum", FEW),
        pytest.param("average:every=4,combine=ensemble", "shrink", "adamw", MANY, marks=pytest.mark.long),
        pytest.param("average:every=5,init=own", "replace", "muon_like", MANY, marks=pytest.mark.long),
        pytest.param("average:every=1", "shrink", "adamw", MANY, marks=pytest.mark.long),
        pytest.param(
            "average:clients=8,share=0.5,partition=own,every=4,buffer=4,oldest=4",
            "replace",
            "adamw",
            MANY,
            marks=pytest.mark.long,
        ),
    ],
)
def test_kills_while_places_with_models_of_their_own_change_hands(
    tmp_path: Path, zygote: ZygoteProcess, strategy: str, policy: str, optimizer: str, rounds: int
) -> None:
    storm = Storm(zygote, tmp_path / "stormy", rounds)
    stormy, events = train(tmp_path / "stormy", storm, 100_000, policy, strategy, optimizer)
    calm, _ = train(tmp_path / "calm", ObservedEngine(zygote), stormy["steps"], policy, strategy, optimizer)
    assert storm.killed == rounds
    for kind in ("lost", "replaced", "scaled"):
        assert any(event.kind == kind for event in events), f"nobody was {kind}"
    assert (stormy["digest"], stormy["state_digest"]) == (calm["digest"], calm["state_digest"])
    assert stormy["loss"] == calm["loss"] and stormy["agreements"] == calm["agreements"]
    assert stormy["audit"]["clean"] and calm["audit"]["clean"]


@pytest.mark.parametrize("rounds", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_kills_while_shards_change_hands(tmp_path: Path, zygote: ZygoteProcess, rounds: int) -> None:
    storm = Storm(zygote, tmp_path / "stormy", rounds, role="server", most=3)
    stormy, events = train(tmp_path / "stormy", storm, 100_000, strategy="ps:servers=2,shards=6")
    calm, _ = train(tmp_path / "calm", ObservedEngine(zygote), stormy["steps"])
    assert storm.killed == rounds
    decided = {event.values["what"] for event in events if event.kind == "decision"}
    assert {"moved", "lost"} <= decided, decided
    assert stormy["digest"] == calm["digest"]
