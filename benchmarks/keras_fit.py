"""Keras on two processes, under Shoal and under torch's DDP by hand: `python -m benchmarks.keras_fit`.

The perceptron of 20.9 M parameters, 64 samples for each process, a thread each, in fresh processes, in turns.
`task` is `Task.from_keras` under `shoal train`, `fit` is Keras's own loop by `shoal.keras.distribute`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.fresh import ROOT, surroundings
from benchmarks.keras_task import BATCH_PER_PROCESS
from benchmarks.models import warm_up_steps
from benchmarks.recorded import record
from shoal.bench.laps import rotated
from shoal.launch.scripts import run_script
from shoal.spec import Cluster, Job

PROCESSES = 2
FLOOR = 1.6
"""Times DDP by hand, of the task."""
WAYS = ("ddp", "task", "fit")


def step_times(way: str, steps: int) -> list[float]:
    """Of one run."""
    cluster = Cluster(workers=PROCESSES, threads=1)
    if way == "task":
        args = {"steps": steps, "processes": PROCESSES}
        run = record(Job(target="benchmarks.keras_task:task", args=args, cluster=cluster))
        return [after - before for (before, _), (after, _) in pairwise(run.timeline)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "times")
        run_script(
            ROOT / "benchmarks" / "keras_script.py",
            [way, str(steps), str(out)],
            cluster=cluster,
            stream=sys.stderr.buffer,
        )
        times: list[float] = json.loads(out.read_text(encoding="utf-8"))
    return times


def main(argv: Sequence[str]) -> int:
    """Print a line of JSON; 1 where the floor is not reached."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.keras_fit", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="measured steps of a run")
    given = parser.parse_args(argv)
    os.environ.update(surroundings())
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(given.rounds):
        for way in rotated(list(WAYS), turn):
            found[way].append(median(step_times(way, given.steps + warm_up_steps(given.steps))[-given.steps :]))
    ratios = {way: median(d / t for d, t in zip(found["ddp"], found[way], strict=True)) for way in WAYS}
    told = {
        way: {
            "samples_per_s": round(PROCESSES * BATCH_PER_PROCESS / median(found[way])),
            "times_ddp": round(ratios[way], 2),
        }
        for way in WAYS
    }
    print(json.dumps({**told, "floor": FLOOR, "is_reached": ratios["task"] >= FLOOR}))
    return 0 if ratios["task"] >= FLOOR else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
