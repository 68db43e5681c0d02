"""How long the workers of a pipeline wait, beside theory, and how fast they are, beside torch's own schedules.

`python -m benchmarks.pipeline_bubble` starts two processes with one thread each, which have half of an MLP's
layers each. Steps of all variants alternate, so that what else the machine does hits all alike; the table shows
medians.

The bubble of a step is the share of it in which workers wait: for what they receive, or, when they are done, for
the one that is not. Theory has it at (p - 1) / (m + p - 1) for p workers and m micro-batches.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

from benchmarks.fresh import module_command, surroundings
from shoal.comm.group import TorchGroup
from shoal.layout.schedules import make_schedule
from shoal.strategies.cut.executor import Executor, Microbatch
from shoal.strategies.cut.stage_run import StageRun
from shoal.strategies.mesh.pipeline.chain import Chain

WORKERS = 2
MICROBATCHES = (2, 4, 8, 16)
WIDTH, LAYERS, ROWS = 1024, 4, 128
"""Of a layer, of a stage, and of a micro-batch."""
OURS = ("gpipe", "1f1b", "zero-bubble")
TORCHS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


@dataclass
class Timings:
    """Of one variant with one number of micro-batches: what its steps showed."""

    step_s: list[float] = field(default_factory=list)
    bubbles: list[float] = field(default_factory=list)


def theory(microbatches: int) -> float:
    """The share of a step in which workers wait."""
    return (WORKERS - 1) / (microbatches + WORKERS - 1)


class BubbleContest:
    """One worker's part in all variants, on layers that all of them share."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        whole = nn.Sequential(
            *(layer for _ in range(WORKERS * LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
        )
        self._rank = rank
        self._rows = torch.randn(max(MICROBATCHES) * ROWS, WIDTH)
        half = 2 * LAYERS
        stages = Chain(whole, self._rows[:ROWS]).stages([half] * WORKERS)
        run = StageRun(stages[rank], stages[rank].parameters)
        group = TorchGroup(rank, range(WORKERS))
        self._executor = Executor({rank: run}, make_schedule("1f1b", workers=WORKERS), group)
        self._layers = whole[half * rank : half * (rank + 1)]

    def variant(self, name: str, microbatches: int) -> Callable[[], float]:
        """Runs one step; returns how long this worker waited, 0 where it cannot tell."""
        owner, _, schedule = name.partition(" ")
        rows = self._rows[: microbatches * ROWS]
        return (self._torchs if owner == "torch" else self._ours)(schedule, microbatches, rows)

    def _ours(self, schedule: str, count: int, rows: torch.Tensor) -> Callable[[], float]:
        actions = make_schedule(schedule, workers=WORKERS).actions(count)[self._rank]
        microbatches = [
            Microbatch(
                given={"input": part}, finish=partial(F.mse_loss, target=part), share=1 / count, shape="rows"
            )
            for part in rows.chunk(count)
        ]

        def step() -> float:
            before = self._executor.traffic.waited_s
            self._executor.run(actions, microbatches)
            return self._executor.traffic.waited_s - before

        return step

    def _torchs(self, schedule: str, count: int, rows: torch.Tensor) -> Callable[[], float]:
        stage = PipelineStage(self._layers, self._rank, WORKERS, torch.device("cpu"))
        made = TORCHS[schedule](stage, count, loss_fn=F.mse_loss)

        def step() -> float:
            if self._rank == 0:
                made.step(rows)
            else:
                made.step(target=rows)
            return 0.0

        return step

    def time(self, step: Callable[[], float]) -> tuple[float, float]:
        """The duration of a step of all workers, and its bubble."""
        self._layers.zero_grad(set_to_none=True)
        dist.barrier()
        began = time.perf_counter()
        waited = step()
        own = time.perf_counter() - began
        every = [torch.zeros(2, dtype=torch.float64) for _ in range(WORKERS)]
        dist.all_gather(every, torch.tensor([own, own - waited], dtype=torch.float64))
        duration = max(float(each[0]) for each in every)
        busy = sum(float(each[1]) for each in every)
        return duration, 1 - busy / (WORKERS * duration)


def run_worker(rank: int, store: str, rounds: int) -> None:
    """One of the processes; the first prints the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, WORKERS), rank=rank, world_size=WORKERS)
    contest = BubbleContest(rank)
    names = [*(f"shoal {name}" for name in OURS), *(f"torch {name}" for name in TORCHS)]
    found: dict[tuple[str, int], Timings] = {}
    for microbatches in MICROBATCHES:
        steps = {name: contest.variant(name, microbatches) for name in names}
        for number in range(rounds + 1):
            first = number % len(names)  # each takes every turn: one that follows another finds its memory
            for name in (*names[first:], *names[:first]):
                duration, bubble = contest.time(steps[name])
                if number:  # the first round tells shapes and fills caches
                    timings = found.setdefault((name, microbatches), Timings())
                    timings.step_s.append(duration)
                    timings.bubbles.append(bubble)
    if rank == 0:
        print("\n".join(table(found, names)))
    dist.destroy_process_group()


def table(found: dict[tuple[str, int], Timings], names: Sequence[str]) -> list[str]:
    """Bubbles and rows per second, in Markdown."""
    lines = [
        "| micro-batches | (p-1)/(m+p-1) |" + "".join(f" {name} |" for name in names),
        "|---|---|" + "---|" * len(names),
    ]
    for microbatches in MICROBATCHES:
        cells = []
        for name in names:
            timings = found[name, microbatches]
            rate = f"{microbatches * ROWS / statistics.median(timings.step_s):.0f} rows/s"
            bubble = statistics.median(timings.bubbles)
            cells.append(rate if name.startswith("torch") else f"{bubble:.3f}, {rate}")
        lines.append(f"| {microbatches} | {theory(microbatches):.3f} |" + "".join(f" {cell} |" for cell in cells))
    return lines


def main() -> int:
    """Start the processes and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="steps of each variant that are measured")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_worker(args.rank, args.store, args.rounds)
        return 0
    environment = surroundings(GLOO_SOCKET_IFNAME="lo")
    with tempfile.TemporaryDirectory() as folder:
        command = module_command("pipeline_bubble", "--rounds", str(args.rounds))
        command += ["--store", f"{folder}/store", "--rank"]
        processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(WORKERS)]
        return max(process.wait() for process in processes)


if __name__ == "__main__":
    sys.exit(main())
