"""What `shoal.Trainer` costs in one process, beside a loop written by hand with the same allocator and optimizer.

`python -m benchmarks.trainer_overhead SIDE MODEL` measures one side in a fresh process.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.bars import TRAINER_BARS, BarFinding, BarVerdict, Ceiling, judge
from benchmarks.compare import SpeedRow, compare
from benchmarks.fresh import module_command
from benchmarks.measurement import Measurement, summarise
from benchmarks.variants import CommandBuilder

if TYPE_CHECKING:
    from benchmarks.models import Batch, Workload

DIGITS_CEILING = Ceiling(model="digits", subject="trainer, a step's extra", peer="loop", most=50, unit="µs")


def compare_trainer(
    model: str, *, rounds: int, steps: int | None, on_measured: Callable[[Measurement], None] | None = None
) -> tuple[list[SpeedRow], list[BarVerdict | BarFinding]]:
    """Both sides on one model, and whether the bars for it are met."""
    rows = compare(
        model, list(SIDES), rounds=rounds, processes=1, steps=steps, variants=SIDES, on_measured=on_measured
    )
    verdicts: list[BarVerdict | BarFinding] = [*judge(rows, TRAINER_BARS)]
    if model == DIGITS_CEILING.model:
        trainer, loop = rows
        pairs = zip(trainer.rounds, loop.rounds, strict=True)
        extra_us = tuple((ours.step_s - theirs.step_s) * 1e6 for ours, theirs in pairs)
        verdicts.append(BarFinding(ceiling=DIGITS_CEILING, values=extra_us))
    return rows, verdicts


def _command(side: str, model: str, processes: int, steps: int | None) -> list[str]:
    command = module_command("trainer_overhead", side, model)
    return command if steps is None else [*command, "--steps", str(steps)]


SIDES: dict[str, CommandBuilder] = {side: functools.partial(_command, side) for side in ("trainer", "loop")}


def make_trainer_step(workload: Workload) -> Callable[[Batch], float]:
    """A step of `shoal.Trainer`."""
    from shoal.roles.trainer.trainer import Trainer
    from shoal.spec import Task

    task = Task(
        model=workload.model,
        loss=workload.loss,
        optimizer=lambda params: workload.optimizer(params, fused=True),
        train=[workload.batch(0, 0)],
    )
    return Trainer(task).step


def make_loop_step(workload: Workload) -> Callable[[Batch], float]:
    """The same by hand, with the loss read at each step as the trainer does."""
    from shoal.arena.malloc import keep_freed_memory

    keep_freed_memory()
    model = workload.model()
    optimizer = workload.optimizer(model.parameters(), fused=True)

    def step(batch: Batch) -> float:
        inputs, target = batch
        optimizer.zero_grad()
        loss = workload.loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def measure(side: str, model: str, steps: int | None) -> Measurement:
    """Measure one side in this process."""
    import torch

    from benchmarks.models import WORKLOADS, warm_up_steps

    torch.set_num_threads(1)
    workload = WORKLOADS[model]()
    step = make_trainer_step(workload) if side == "trainer" else make_loop_step(workload)
    measured = steps or workload.steps
    times_s, loss = [], float("nan")
    for number in range(warm_up_steps(measured) + measured):
        batch = workload.batch(0, number)
        begin = time.perf_counter()
        loss = step(batch)
        times_s.append(time.perf_counter() - begin)
    return summarise(
        variant=side,
        model=model,
        processes=1,
        batch_per_process=workload.batch_per_process,
        step_times_s=times_s[-measured:],
        loss=loss,
    )


def main(argv: Sequence[str]) -> None:
    """Print one side's measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int)
    given = parser.parse_args(argv)
    print(measure(given.side, given.model, given.steps).to_json())


if __name__ == "__main__":
    main(sys.argv[1:])
