"""Workers and newcomers are killed while places change hands, and not one bit changes."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import Interrupted
from shoal.launch import Handle, LocalEngine, Supervisor, ZygoteProcess
from shoal.launch.control import request_scale
from shoal.observe import Event
from shoal.spec import Cluster, Job, World

TASKS = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"
PLACES = 4
ROUNDS = 24
GUARD_S = 60.0


class Storm(LocalEngine):
    """Asks for another number of workers and kills somebody, in turn, at any moment; then stops the run."""

    def __init__(self, zygote: ZygoteProcess, folder: Path) -> None:
        super().__init__(zygote)
        self.killed = 0
        self._folder = folder
        self._random = random.Random(8)
        self._begin, self._over = threading.Event(), threading.Event()

    def start(self, job: Job, worlds: Sequence[World]) -> Handle:
        self._handle = super().start(job, worlds)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self._handle

    def on_event(self, event: Event) -> None:
        if event.kind == "steps":
            self._begin.set()

    def finish(self) -> None:
        self._over.set()
        self._begin.set()
        self._thread.join(GUARD_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        self._begin.wait(GUARD_S)
        for _ in range(ROUNDS):
            if self._over.wait(self._random.uniform(0.0, 0.15)):
                return
            request_scale(self._folder, workers=self._random.randint(1, PLACES))
            if self._over.wait(self._random.uniform(0.0, 0.15)):
                return
            living = [member for member in self._handle.members if member.is_alive and member.pid is not None]
            self._handle.signal(self._random.choice(living), signal.SIGKILL)
            self.killed += 1
        os.kill(os.getpid(), signal.SIGINT)


def train(folder: Path, engine: LocalEngine, steps: int, policy: str) -> tuple[dict[str, Any], list[Event]]:
    folder.mkdir()
    job = Job(
        target=f"{TASKS}:mlp",
        args={"optimizer": "adamw", "clip": 1.0},
        cluster=Cluster(workers=PLACES, threads=1),
        overrides={"max_steps": steps, "epochs": steps, "evaluate_every": 5},
        run_dir=str(folder),
        options={"state": str(folder / "state.safetensors")},
        on_failure=policy,
        max_failures=ROUNDS,
    )
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(engine, Storm):
            engine.on_event(event)

    try:
        Supervisor(job, listen, engine).run()
    except Interrupted:
        assert isinstance(engine, Storm)
    finally:
        if isinstance(engine, Storm):
            engine.finish()
    return next(e.values["results"] for e in events if e.kind == "done" and e.rank == 0), events


@pytest.mark.parametrize("policy", ["replace", "shrink"])
def test_kills_while_places_change_hands(tmp_path: Path, zygote: ZygoteProcess, policy: str) -> None:
    storm = Storm(zygote, tmp_path / "stormy")
    stormy, events = train(tmp_path / "stormy", storm, 100_000, policy)
    calm, _ = train(tmp_path / "calm", LocalEngine(zygote), stormy["steps"], policy)
    assert storm.killed == ROUNDS
    for kind in ("lost", "replaced", "scaled"):
        assert any(event.kind == kind for event in events), f"nobody was {kind}"
    assert (stormy["digest"], stormy["state_digest"]) == (calm["digest"], calm["state_digest"])
    assert stormy["loss"] == calm["loss"]
