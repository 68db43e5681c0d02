"""Processes that share one GPU's memory; runs where there is one."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.killing import Killer
from helpers.observed import ObservedEngine
from shoal.arena.device import DeviceSegment
from shoal.arena.shelf import FdShelf
from shoal.arena.waits import LINE
from shoal.errors import Interrupted, ShoalError
from shoal.launch.live import Run
from shoal.launch.owner import ZygoteProcess
from shoal.launch.runs import train as start
from shoal.observe import Event
from shoal.spec import Cluster, Job
from shoal.strategies.data.shared import Marks

TASKS = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"
TOLD = Path(__file__).parent / "told_tasks.py"
KILLS = 20
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")

MAKER = """
    import sys, torch
    from shoal.arena.cuda_driver import CudaDriver
    from shoal.arena.device import DeviceSegment
    from shoal.arena.shelf import FdShelf

    segment = DeviceSegment(CudaDriver("cuda:0"), FdShelf.of(tuple(map(int, sys.argv[1:]))))
    segment.reserve("still", 1 << 20)
    segment.reserve("moving", 64 << 20)
    segment.map(makes=True)
    assert not segment.tensor("moving", torch.uint8).any()
    segment.tensor("still", torch.float32).copy_(torch.arange(1 << 18))
    torch.cuda.synchronize()
    print("made", flush=True)
    moving = segment.tensor("moving", torch.float32)
    while True:
        moving.add_(1.0)
"""


def train(folder: Path, zygote: ZygoteProcess, name: str, task: str = "mlp", **asked: Any) -> Run:
    """A run in the memory of one GPU."""
    cluster = {
        "threads": 1,
        "device": "cuda",
        "workers": asked.pop("workers", 2),
        "spares": asked.pop("spares", 0),
    }
    usual: dict[str, Any] = {"target": f"{TASKS}:{task}", "args": {"steps": 40}, "strategy": "data:via=arena"}
    return start(name=name, runs=folder, zygote=zygote, output=StringIO(), cluster=cluster, **(usual | asked))


def test_memory_of_a_gpu_outlives_who_made_it() -> None:
    from shoal.arena.cuda_driver import CudaDriver

    shelf = FdShelf.make()
    maker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(MAKER), *map(str, shelf.fds)],
        pass_fds=shelf.fds,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert maker.stdout is not None and maker.stdout.readline() == "made\n"
    time.sleep(0.2)
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    heir = DeviceSegment(CudaDriver("cuda:0"), shelf)
    heir.reserve("still", 1 << 20)
    heir.reserve("moving", 64 << 20)
    heir.map(makes=False)
    assert torch.equal(heir.tensor("still", torch.float32).cpu(), torch.arange(1 << 18).float())
    before = heir.tensor("moving", torch.float32).clone()
    time.sleep(0.1)
    after = heir.tensor("moving", torch.float32)
    assert float(before.max()) > 0 and torch.equal(before, after), "nobody writes any more"
    after.add_(1.0)
    assert torch.equal(heir.tensor("moving", torch.float32), before + 1.0)


@pytest.mark.parametrize(
    ("task", "asked"),
    [
        ("mlp", {"args": {"optimizer": "momentum", "steps": 40}}),
        ("mlp", {"args": {"optimizer": "adamw", "steps": 40, "clip": 1.0}}),
        ("mlp", {"args": {"optimizer": "Adagrad", "steps": 40}}),  # counts its steps on the host
        ("mlp", {"args": {"optimizer": "NAdam", "steps": 40}}),
        ("told", {"target": f"{TOLD}:told", "args": {"ema": 0.9, "optimizer": "AdamW"}}),
        ("told", {"target": f"{TOLD}:told", "args": {"swa": 5, "optimizer": "AdamW"}}),  # counts on both
        ("mlp", {"args": {"optimizer": "adamw", "steps": 40}, "accumulate": 2}),
        ("gpt", {"precision": "bf16"}),
        ("gpt", {"precision": "fp16"}),
        ("conv", {}),  # whose buffers move
        ("awkward", {}),  # of which slots touch parts
        ("padded", {}),  # whose slots do not count the same
    ],
)
def test_workers_that_share_a_gpu_train_as_one_with_their_slots(
    zygote: ZygoteProcess, tmp_path: Path, task: str, asked: dict[str, Any]
) -> None:
    one = train(tmp_path, zygote, "one", task, workers=1, slots=3, **asked)
    two = train(tmp_path, zygote, "two", task, workers=2, slots=3, **asked)
    assert one.digest == two.digest and one.results["loss"] == two.results["loss"]
    assert two.results["audit"]["clean"]


def test_they_train_as_the_cpu_does(zygote: ZygoteProcess, tmp_path: Path) -> None:
    on_cpu = start(
        f"{TASKS}:gpt_quiet", name="cpu", runs=tmp_path, zygote=zygote, output=StringIO(), args={"steps": 40}
    )
    found = train(tmp_path, zygote, "gpu", "gpt_quiet")
    compiled = train(tmp_path, zygote, "compiled", "gpt_quiet", compile=True)
    for one in (found, compiled):
        assert one.results["loss"] == pytest.approx(on_cpu.results["loss"], rel=1e-3)


def test_a_run_goes_on_from_a_checkpoint(zygote: ZygoteProcess, tmp_path: Path) -> None:
    whole = train(tmp_path, zygote, "whole", args={"optimizer": "adamw", "steps": 40})
    train(tmp_path, zygote, "half", args={"optimizer": "adamw", "steps": 40}, checkpoint="every=20")
    resumed = start(resume="half@20", runs=tmp_path, zygote=zygote, output=StringIO())
    assert resumed.digest == whole.digest


class GpuKiller(Killer):
    """Kills where the model is being updated, or anywhere."""

    def _wait_for_torn_chunk(self, marks: Marks, place: int) -> None:
        begun, done = marks.progress[-1] * LINE, marks.updated[-1] * LINE
        with mmap.mmap(self.host.arena_fd, marks.count * LINE, prot=mmap.PROT_READ) as memory:
            give_up = time.monotonic() + 2.0
            while memory[begun : begun + 4] == memory[done : done + 4] and time.monotonic() < give_up:
                pass
        time.sleep(self._random.uniform(0.0, 0.003))  # it was asked for, and the GPU comes to it


def storm(
    folder: Path, engine: ObservedEngine, args: dict[str, Any], steps: int, **job: Any
) -> tuple[dict[str, Any], list[Event]]:
    """Train until the end or until the killer has had enough; what the run left, and what it told."""
    folder.mkdir(parents=True)
    cluster = Cluster(threads=1, device="cuda", workers=2, spares=job.pop("spares", 0))
    asked = Job(
        target=f"{TASKS}:mlp",
        args=args,
        cluster=cluster,
        strategy="data:via=arena",
        overrides={"evaluate_every": 1000, "max_steps": steps, "epochs": steps},
        run_dir=str(folder),
        options={"state": str(folder / "state.safetensors")},
        max_failures=KILLS,
        **job,
    )
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(engine, Killer):
            engine.on_event(event)

    try:
        engine.run(asked, listen)
    except Interrupted:
        assert isinstance(engine, Killer)
    finally:
        if isinstance(engine, Killer):
            engine.finish()
    return next(e.values["results"] for e in events if e.kind == "done" and e.rank == 0), events


def storm_and_calm(
    folder: Path, zygote: ZygoteProcess, plan: Sequence[tuple[int, bool]], **job: Any
) -> list[Event]:
    """Train under fire and in peace: all kills must have fired, and all bits must agree. What the storm told."""
    args = {"width": 8000, "optimizer": "adamw", "clip": 1.0}
    killer = GpuKiller(zygote, plan)
    stormy, events = storm(folder / "stormy", killer, args, 1_000_000, **job)
    calm, _ = storm(folder / "calm", ObservedEngine(zygote), args, stormy["steps"])
    assert killer.killed == len(plan) == sum(event.kind == "lost" for event in events)
    assert sum(event.kind == "replaced" for event in events) == len(plan)
    assert (stormy["digest"], stormy["state_digest"]) == (calm["digest"], calm["state_digest"])
    assert stormy["loss"] == calm["loss"]
    return events


def torn(events: Sequence[Event]) -> int:
    """How many kills fell into an update."""
    return sum(event.kind == "line" and "put back" in event.values["text"] for event in events)


def test_many_kills_change_no_bit(zygote: ZygoteProcess, tmp_path: Path) -> None:
    plan = [(int(number % 5 > 0), number % 5 > 1) for number in range(KILLS)]
    events = storm_and_calm(tmp_path, zygote, plan, spares=2)
    assert torn(events) >= 1
    waits = [event.values.get("seconds") for event in events if event.kind == "replaced"]
    print(f"{torn(events)} of {KILLS} kills fell into an update; replaced after {waits}")


def test_fresh_processes_and_survivors_follow_as_spares_do(zygote: ZygoteProcess, tmp_path: Path) -> None:
    storm_and_calm(tmp_path / "fresh", zygote, [(0, False), (1, True), (1, False)])
    storm_and_calm(tmp_path / "shrink", zygote, [(1, True), (0, False)], on_failure="shrink")


def test_one_worker_with_a_spare_outlives_a_kill(zygote: ZygoteProcess, tmp_path: Path) -> None:
    calm = train(tmp_path, zygote, "calm", workers=1)
    found = train(tmp_path, zygote, "killed", workers=1, spares=1, chaos="kill worker:0 at step 20")
    assert found.digest == calm.digest and "restarts" not in found.results
    assert '"replaced"' in (Path(found.folder) / "events.jsonl").read_text()


def test_what_does_not_work_element_by_element_is_refused(zygote: ZygoteProcess, tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match=r"element by element.*via=backend"):
        train(tmp_path, zygote, "whole", args={"optimizer": "muon_like"})
