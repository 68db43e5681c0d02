"""Measure Shoal itself, in fresh processes: `python -m benchmarks.shoal_variant STRATEGY MODEL`."""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measurement import Measurement, Timeline, summarise, summarise_timeline
from benchmarks.models import WORKLOADS, warm_up_steps
from benchmarks.straggler import STRAGGLERS
from shoal.launch.engines import engine_for
from shoal.launch.supervisor import Supervisor
from shoal.roles.process.timeline import read_timeline
from shoal.spec import Cluster, Job, parse_strategy
from shoal.spec.strategy import StrategySpec

COOL_DOWN_STEPS = 5
"""While so many steps are left nobody has run out of work: a worker holds two cells at most, or is three steps
ahead, and what the first worker knows of the others is a step old."""


def measure(arguments: argparse.Namespace) -> Measurement:
    """Train a benchmark model under a strategy and read its speed off its timeline."""
    workload = WORKLOADS[arguments.model]()
    measured = arguments.steps or workload.steps
    warm_up, batch = warm_up_steps(measured), workload.batch_per_process * arguments.processes
    lockstep = goes_in_lockstep(parse_strategy(arguments.strategy))
    timeline, loss = train(arguments, warm_up + measured + (0 if lockstep else COOL_DOWN_STEPS))
    about = {"variant": arguments.name, "model": workload.name, "processes": arguments.processes, "loss": loss}
    if lockstep:
        times_s = [after - before for (before, _), (after, _) in itertools.pairwise(timeline)]
        return summarise(
            step_times_s=times_s[-measured:],
            batch_per_process=workload.batch_per_process,
            ended_at=timeline[-1][0],
            **about,
        )
    window = range(warm_up * batch, (warm_up + measured) * batch)
    return summarise_timeline(timeline, batch=batch, window=window, **about)


def goes_in_lockstep(strategy: StrategySpec) -> bool:
    """Whether a step of the first worker is a step of all."""
    return strategy.conduct(Cluster()).is_lockstep


def train(arguments: argparse.Namespace, steps: int) -> tuple[Timeline, float]:
    """So many steps in fresh processes: when how many samples were committed, and the last loss."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        path = Path(folder) / "timeline"
        args = {"model": arguments.model, "processes": arguments.processes, "steps": steps}
        job = Job(
            target="benchmarks.tasks:task",
            args=args if arguments.straggler is None else {**args, "straggler": arguments.straggler},
            strategy=arguments.strategy,
            cluster=Cluster(
                workers=arguments.processes,
                threads=1,
                on=arguments.on,
                trusted_network=arguments.trusted_network,
            ),
            products=arguments.products,
            options={"timeline": str(path)},
        )
        engine = engine_for(job.cluster, None, tell=lambda text: print(text, file=sys.stderr))
        results = Supervisor(job, lambda event: None, engine).run()
        return read_timeline(path), results["loss"]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shoal_variant", description=__doc__)
    parser.add_argument("strategy")
    parser.add_argument("model", choices=sorted(WORKLOADS))
    parser.add_argument("--name", default="data")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, help="measured steps; default the model's own number")
    parser.add_argument("--straggler", choices=STRAGGLERS, help="slow the last worker down, or each in turn")
    parser.add_argument("--on", default="local", help="where workers run; default here")
    parser.add_argument("--trusted-network", action="store_true", help="do not encrypt what passes between hosts")
    parser.add_argument("--products", default="torch", help="who multiplies: torch or onednn")
    return parser.parse_args(argv)


if __name__ == "__main__":
    print(measure(parse(sys.argv[1:])).to_json())
