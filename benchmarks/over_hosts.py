"""How fast workers train that a network separates: `python -m benchmarks.over_hosts [CONTEST …]`.

Hosts are network namespaces of this machine, which needs root. Beside Shoal runs torch's DDP over gloo, which
encrypts nothing, on as many processes in the same namespaces; fresh processes, variants in turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.bars import Bar, BarVerdict, judge
from benchmarks.compare import SpeedRow, compare
from benchmarks.measurement import Measurement
from benchmarks.namespaces import Network, why_not
from benchmarks.table import rows_table, verdicts_table
from benchmarks.variants import CommandBuilder, peer_command, shoal_command
from shoal.cli.failures import show_failure
from shoal.errors import LaunchError, ShoalError
from shoal.observe.wording import memory

STEPS = {"mlp": 12, "gpt": 40}


@dataclass(frozen=True, kw_only=True)
class HostContest:
    """Workers on some hosts, and what is promised beside DDP."""

    model: str
    hosts: int
    workers: int
    floors: dict[str, float]
    """By variant."""
    rate: str = ""
    """Of each cable, in each direction; none: as fast as the machine."""


SHOAL_VARIANTS = {
    "encrypted": "data",
    "trusted": "data",
    "bf16": "data:between=bf16",
    "bf16_trusted": "data:between=bf16",
}
"""Strategies by variant: `data` along the chain of hosts, encrypted or not, and cast or not."""
CONTESTS = {
    "mlp-2x2": HostContest(model="mlp", hosts=2, workers=4, floors={"encrypted": 1.25, "trusted": 1.5}),
    "gpt-2x2": HostContest(model="gpt", hosts=2, workers=4, floors={"encrypted": 1.1}),
    "mlp-3x1": HostContest(model="mlp", hosts=3, workers=3, floors={"encrypted": 0.85}),
    "mlp-3x1-1gbit": HostContest(model="mlp", hosts=3, workers=3, floors={"bf16": 1.2}, rate="1gbit"),
}


def run_contest(
    contest: HostContest, folder: Path, *, rounds: int, steps: int | None, tell: Console
) -> tuple[list[SpeedRow], list[BarVerdict]]:
    """Measure DDP and the contest's variants of Shoal, in turn."""

    with Network(contest.hosts) as network:
        carried = [network.carried_bytes()]

        def on_measured(run: Measurement) -> None:
            carried.append(network.carried_bytes())
            tell.print(
                f"  {run.variant:<10} {run.step_s * 1e3:>8.1f} ms  {run.samples_per_s:>8,.0f} samples/s  "
                f"{memory(carried[-1] - carried[-2])} between hosts",
                style="dim",
            )

        if contest.rate:
            network.limit(contest.rate)
        on, environment = network.reached_by_command(folder)
        os.environ.update(environment)
        names = ",".join(host.name for host in network.hosts)
        variants: dict[str, CommandBuilder] = {"ddp": partial(_ddp_command, names)}
        variants |= {name: partial(_data_command, on, name) for name in contest.floors}
        rows = compare(
            contest.model,
            list(variants),
            rounds=rounds,
            processes=contest.workers,
            steps=steps or STEPS[contest.model],
            variants=variants,
            on_measured=on_measured,
        )
    bars = [Bar(contest.model, name, "ddp", floor) for name, floor in contest.floors.items()]
    return rows, judge(rows, bars)


def _ddp_command(namespaces: str, model: str, processes: int, steps: int | None) -> list[str]:
    return [*peer_command("ddp", model, processes, steps), "--namespaces", namespaces]


def _data_command(on: str, variant: str, model: str, processes: int, steps: int | None) -> list[str]:
    command = shoal_command(variant, SHOAL_VARIANTS[variant], model, processes, steps)
    return [*command, "--on", on, *(["--trusted-network"] if "trusted" in variant else [])]


def main(argv: Sequence[str]) -> int:
    """Measure and print; the exit status is 1 where a promise was not kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.over_hosts", description=__doc__)
    parser.add_argument("contests", nargs="*", help="default all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="measured steps of a run; default the model's own number")
    arguments = parser.parse_args(argv)
    if (reason := why_not()) is not None:
        return show_failure(LaunchError(f"bench: {reason}."))
    console, kept = Console(highlight=False), True
    try:
        for name in arguments.contests or CONTESTS:
            console.print(name)
            with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
                rows, verdicts = run_contest(
                    CONTESTS[name], Path(folder), rounds=arguments.rounds, steps=arguments.steps, tell=console
                )
            console.print(rows_table(rows, title=name))
            console.print(verdicts_table(verdicts))
            kept = kept and all(verdict.met for verdict in verdicts)
    except ShoalError as error:
        return show_failure(error)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
