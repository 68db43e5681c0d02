"""How true `--link` is: `python -m benchmarks.link_emulation`, beside cables that are as slow (as root).

A job runs on two hosts that are namespaces, with a cable between them that does to every frame what `tc netem`
does (rate, delay, loss; `benchmarks.long_cable`, since a machine's kernel may have no netem); and on the same
hosts without that, but with `--link` of the same numbers. What is compared is the time of a step, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.models import WORKLOADS
from benchmarks.namespaces import Network, why_not
from shoal.bench.laps import rotated
from shoal.cli.failures import show_failure
from shoal.errors import LaunchError, ShoalError
from shoal.launch.engines import engine_for
from shoal.launch.supervisor import Supervisor
from shoal.roles.process.timeline import read_timeline
from shoal.spec import Cluster, Job
from shoal.spec.link import NetworkLink

HOSTS, WARM_UP = 2, 4
MOST_OFF = 0.2
"""So far the emulated time may be from the real one."""
LINKS = {
    "wide and far": "bandwidth=100mbit,latency=20ms",
    "narrow": "bandwidth=10mbit,latency=5ms",
    "lossy": "bandwidth=100mbit,latency=20ms,loss=0.1%",
    "very lossy": "bandwidth=10mbit,latency=5ms,loss=1%",
}
STRATEGIES = ("data", "ps:sync=bsp")


def step_s(job: Job) -> float:
    """The mean time of a step after the first few: steps may be told several at a time."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        path = Path(folder) / "timeline"
        engine = engine_for(job.cluster, None, tell=lambda text: print(text, file=sys.stderr))
        job = replace(job, run_dir=folder, options={**job.options, "timeline": str(path)})
        Supervisor(job, lambda event: None, engine).run()
        times = [when for when, _ in read_timeline(path)]
    return (times[-1] - times[WARM_UP]) / (len(times) - 1 - WARM_UP)


def step_over(link: str, strategy: str, model: str, steps: int, *, is_real: bool) -> float:
    """The time of a step between fresh namespaces, over cables that are so slow, or that seem to be."""
    cable = NetworkLink.parse(LINKS[link])
    with ExitStack() as open_now:
        folder = Path(open_now.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        network = open_now.enter_context(Network(HOSTS))
        on, environment = network.reached_by_command(folder)
        os.environ.update(environment)
        network.control_congestion("reno")
        if is_real:
            open_now.enter_context(network.long_cable(cable.latency, cable.bandwidth, cable.loss))
        return step_s(
            Job(
                target="benchmarks.tasks:task",
                args={"model": model, "processes": HOSTS, "steps": steps + WARM_UP},
                strategy=strategy,
                cluster=Cluster(workers=HOSTS, threads=1, on=on, link="" if is_real else LINKS[link]),
            )
        )


def compare(link: str, strategy: str, model: str, rounds: int, steps: int) -> dict[str, object]:
    """One job over one link, both ways."""
    found: dict[str, list[float]] = {"real": [], "emulated": []}
    for turn in range(rounds):
        for way in rotated(list(found), turn):
            found[way].append(step_over(link, strategy, model, steps, is_real=way == "real"))
    real, seen = median(found["real"]), median(found["emulated"])
    return {
        "link": LINKS[link],
        "strategy": strategy,
        "model": model,
        "real_ms": round(real * 1e3, 1),
        "emulated_ms": round(seen * 1e3, 1),
        "off": round(seen / real - 1, 3),
    }


def main(argv: Sequence[str]) -> int:
    """Print a line of JSON for each; 1 where one is too far off."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.link_emulation", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--links", nargs="*", default=list(LINKS), choices=LINKS)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", choices=WORKLOADS, default="digits", help="`digits`: 77 KB go over the cable")
    given = parser.parse_args(argv)
    if (reason := why_not()) is not None:
        return show_failure(LaunchError(f"bench: {reason}."))
    is_true = True
    try:
        for link in given.links:
            for strategy in STRATEGIES:
                row = compare(link, strategy, given.model, given.rounds, given.steps)
                is_true = is_true and abs(float(str(row["off"]))) <= MOST_OFF
                print(json.dumps(row), flush=True)
    except ShoalError as error:
        return show_failure(error)
    return 0 if is_true else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
