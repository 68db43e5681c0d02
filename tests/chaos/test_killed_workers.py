"""Workers killed at any moment: spares take their slots, and not one bit changes."""

from __future__ import annotations

import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.arena.waits import LINE
from shoal.errors import Interrupted
from shoal.launch import Handle, LocalEngine, Supervisor, ZygoteProcess
from shoal.observe import Event
from shoal.spec import Cluster, Job, World
from shoal.strategies.base import Setting
from shoal.strategies.data.shared import Marks

TASKS = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"
KILLS = 50


class Killer(LocalEngine):
    """An engine whose workers are killed: every second one in the middle of a chunk, the others anywhere."""

    def __init__(self, zygote: ZygoteProcess, kills: int) -> None:
        super().__init__(zygote)
        self.killed = 0
        self._kills = kills
        self._random = random.Random(11)
        self._ready = threading.Semaphore(0)
        self._over = threading.Event()

    def start(self, job: Job, worlds: Sequence[World]) -> Handle:
        self._handle = super().start(job, worlds)
        self._thread = threading.Thread(target=self._run, args=(job,))
        self._thread.start()
        return self._handle

    def on_event(self, event: Event) -> None:
        """A place is filled again (or for the first time): the next kill may come."""
        if event.kind in ("world", "replaced"):
            self._ready.release()

    def finish(self) -> None:
        self._over.set()
        self._ready.release()
        self._thread.join()

    def _run(self, job: Job) -> None:
        workers = job.cluster.workers
        marks = Marks(Setting(world=World(world_size=workers), slots=workers, slots_per_worker=(1,) * workers))
        for number in range(self._kills):
            self._ready.acquire()
            if self._over.is_set():
                return
            rank = self._random.randrange(workers)
            if number % 2:
                self._wait_for_torn_chunk(marks, rank)
            else:
                time.sleep(self._random.uniform(0.0, 0.04))
            self._kill(rank)
        self._ready.acquire()
        if not self._over.is_set():
            os.kill(os.getpid(), signal.SIGINT)  # enough: the run may end

    def _wait_for_torn_chunk(self, marks: Marks, rank: int) -> None:
        with mmap.mmap(self._handle._arena_fd, marks.count * LINE, prot=mmap.PROT_READ) as memory:
            give_up = time.monotonic() + 0.2  # a small model has no chunk for every worker
            while not memory[marks.progress[rank] * LINE] & 1 and time.monotonic() < give_up:
                time.sleep(0.00005)

    def _kill(self, rank: int) -> None:
        victim = next(
            m for m in self._handle.members if m.role == "worker" and m.global_rank == rank and m.is_alive
        )
        self._handle.signal(victim, 9)
        self.killed += 1


MLP = {"width": 700}


@pytest.mark.parametrize(
    ("model", "args", "least_torn"),
    [
        ("mlp", {**MLP, "optimizer": "momentum"}, 5),
        ("mlp", {**MLP, "optimizer": "adamw", "clip": 1.0}, 5),
        pytest.param("conv", {"optimizer": "momentum"}, 1, marks=pytest.mark.long),
        pytest.param("gpt", {"optimizer": "adamw"}, 1, marks=pytest.mark.long),
    ],
)
def test_fifty_kills_change_no_bit(
    tmp_path: Path, zygote: ZygoteProcess, model: str, args: dict, least_torn: int
) -> None:
    def train(name: str, engine: LocalEngine, *, steps: int, spares: int) -> tuple[dict, list[Event]]:
        folder = tmp_path / name
        folder.mkdir()
        job = Job(
            target=f"{TASKS}:{model}",
            args=args,
            cluster=Cluster(workers=2, threads=1, spares=spares),
            overrides={"evaluate_every": 100, "max_steps": steps, "epochs": steps},
            run_dir=str(folder),
            options={"state": str(folder / "state.safetensors")},
        )
        events: list[Event] = []

        def listen(event: Event) -> None:
            events.append(event)
            if isinstance(engine, Killer):
                engine.on_event(event)

        try:
            Supervisor(job, listen, engine).run()
        except Interrupted:
            assert isinstance(engine, Killer)
        finally:
            if isinstance(engine, Killer):
                engine.finish()
        return next(e.values["results"] for e in events if e.kind == "done" and e.rank == 0), events

    killer = Killer(zygote, KILLS)
    stormy, events = train("stormy", killer, steps=100_000, spares=2)
    calm, _ = train("calm", LocalEngine(zygote), steps=stormy["steps"], spares=0)

    assert killer.killed == KILLS
    assert sum(event.kind == "lost" for event in events) == KILLS
    assert sum(event.kind == "replaced" for event in events) == KILLS
    torn = sum(event.kind == "line" and "put back" in event.values["text"] for event in events)
    assert torn >= least_torn, "hardly any kill fell into a chunk's update"
    assert stormy["reason"] == "stopped"
    assert (stormy["digest"], stormy["state_digest"]) == (calm["digest"], calm["state_digest"])
    assert stormy["loss"] == calm["loss"]
