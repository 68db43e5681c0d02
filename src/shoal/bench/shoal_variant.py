"""Measure Shoal itself, in fresh processes: `python -m shoal.bench.shoal_variant STRATEGY MODEL`."""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path

from shoal.bench.measurement import Measurement, summarise
from shoal.bench.models import WORKLOADS, warm_up_steps
from shoal.launch import run_job
from shoal.spec import Cluster, Job


def measure(name: str, strategy: str, model: str, processes: int, steps: int | None) -> Measurement:
    """Train a benchmark model under a strategy and read the times of its steps off its timeline."""
    workload = WORKLOADS[model]()
    measured = steps or workload.steps
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        timeline = Path(folder) / "timeline.json"
        job = Job(
            target="shoal.bench.tasks:task",
            args={"model": model, "processes": processes, "steps": warm_up_steps(measured) + measured},
            strategy=strategy,
            cluster=Cluster(workers=processes, threads=1),
            options={"timeline": str(timeline)},
        )
        results = run_job(job, lambda event: None)
        times = json.loads(timeline.read_text())
    return summarise(
        variant=name,
        model=model,
        processes=processes,
        batch_per_process=workload.batch_per_process,
        step_times_s=[after - before for before, after in itertools.pairwise(times)][-measured:],
        loss=results["loss"],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategy")
    parser.add_argument("model", choices=sorted(WORKLOADS))
    parser.add_argument("--name", default="data")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int)
    given = parser.parse_args()
    print(measure(given.name, given.strategy, given.model, given.processes, given.steps).to_json())
