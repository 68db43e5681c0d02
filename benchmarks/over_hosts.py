"""How fast workers train that a network separates: `python -m benchmarks.over_hosts [CONTEST …]`.

Hosts are network namespaces of this machine, which needs root. Beside Shoal runs torch's DDP over gloo, which
encrypts nothing, on as many processes in the same namespaces; fresh processes, variants in turn. On a machine that
others use, believe the processor time of a step more than the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.bars import Bar, BarVerdict, judge
from benchmarks.compare import SpeedRow, compare
from benchmarks.measurement import Measurement
from benchmarks.namespaces import Network, why_not
from benchmarks.processor_time import ProcessorClock
from benchmarks.table import rows_table
from benchmarks.variants import CommandBuilder, peer_command, shoal_command
from shoal.cli.failures import show_failure
from shoal.errors import LaunchError, ShoalError
from shoal.observe.wording import memory

STEPS = {"mlp": 12, "gpt": 40}
_WIDTH = 120
"""Of what is printed to no terminal."""


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
    "onednn": "data",
    "onednn_trusted": "data",
    "bf16": "data:between=bf16",
    "bf16_trusted": "data:between=bf16",
}
"""Strategies by variant: `data` along the chain of hosts, encrypted or not, cast or not, with products of torch or
of oneDNN, which `--fast` may choose."""
CONTESTS = {
    "mlp-2x2": HostContest(model="mlp", hosts=2, workers=4, floors={"encrypted": 1.25, "trusted": 1.5}),
    "gpt-2x2": HostContest(model="gpt", hosts=2, workers=4, floors={"encrypted": 1.1}),
    "mlp-3x1": HostContest(model="mlp", hosts=3, workers=3, floors={"encrypted": 0.85}),
    "mlp-2x2-onednn": HostContest(model="mlp", hosts=2, workers=4, floors={"onednn": 1.25, "onednn_trusted": 1.5}),
    "mlp-3x1-1gbit": HostContest(model="mlp", hosts=3, workers=3, floors={"bf16": 1.2}, rate="1gbit"),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a contest came to."""

    rows: list[SpeedRow]
    verdicts: list[BarVerdict]
    processor_s: dict[str, list[float]]
    """By variant, round by round: the processor time of a step, of all processes together."""


def run_contest(contest: HostContest, folder: Path, *, rounds: int, steps: int | None, tell: Console) -> Outcome:
    """Measure DDP and the contest's variants of Shoal, in turn."""
    processor_s: dict[str, list[float]] = {}

    with Network(contest.hosts) as network, ProcessorClock(host.name for host in network.hosts) as clock:
        carried = [network.carried_bytes()]

        def on_measured(run: Measurement) -> None:
            carried.append(network.carried_bytes())
            processor_s.setdefault(run.variant, []).append(clock.of_step(run))
            tell.print(
                f"  {run.variant:<10} {run.step_s * 1e3:>8.1f} ms  {run.samples_per_s:>8,.0f} samples/s  "
                f"{processor_s[run.variant][-1]:.3f} s of processor time a step  "
                f"{memory(carried[-1] - carried[-2])} between hosts",
                style="dim",
                soft_wrap=True,
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
    return Outcome(rows=rows, verdicts=judge(rows, bars), processor_s=processor_s)


def bars_table(outcomes: dict[str, Outcome]) -> Table:
    """Every bar of all contests, and what a step took of the processors beside it."""
    table = Table(title="\nBars: at least so many times the speed of DDP", title_justify="left", box=None)
    for heading in ("contest", "variant"):
        table.add_column(heading, no_wrap=True)
    for heading in ("bar", "measured", "range", "processor s/step", "range", "DDP's", "DDP's / ours"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for name, outcome in outcomes.items():
        for verdict in outcome.verdicts:
            variant, found = verdict.bar.subject, verdict.ratios
            ours, theirs = outcome.processor_s[variant], outcome.processor_s["ddp"]
            used, ddp = statistics.median(ours), statistics.median(theirs)
            table.add_row(
                *(name, variant, f"≥ {verdict.bar.floor:.2f}"),
                *(f"{verdict.ratio:.2f}", f"{min(found):.2f}–{max(found):.2f}"),
                *(f"{used:.3f}", f"{min(ours):.3f}–{max(ours):.3f}", f"{ddp:.3f}"),
                *(f"{ddp / used:.2f}" if used else "", "met" if verdict.met else "missed"),
            )
    return table


def _ddp_command(namespaces: str, model: str, processes: int, steps: int | None) -> list[str]:
    return [*peer_command("ddp", model, processes, steps), "--namespaces", namespaces]


def _data_command(on: str, variant: str, model: str, processes: int, steps: int | None) -> list[str]:
    command = shoal_command(variant, SHOAL_VARIANTS[variant], model, processes, steps)
    if "onednn" in variant:
        command += ["--products", "onednn"]
    return [*command, "--on", on, *(["--trusted-network"] if "trusted" in variant else [])]


def main(argv: Sequence[str]) -> int:
    """Measure and print; the exit status is 1 where a promise was not kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.over_hosts", description=__doc__)
    parser.add_argument("contests", nargs="*", help=f"{', '.join(CONTESTS)}; default all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="measured steps of a run; default the model's own number")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.contests) - CONTESTS.keys():
        parser.error(f"there is no contest {', '.join(sorted(unknown))}; there are {', '.join(CONTESTS)}")
    if (reason := why_not()) is not None:
        return show_failure(LaunchError(f"bench: {reason}."))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    outcomes: dict[str, Outcome] = {}
    try:
        for name in arguments.contests or CONTESTS:
            console.print(name)
            with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
                outcomes[name] = run_contest(
                    CONTESTS[name], Path(folder), rounds=arguments.rounds, steps=arguments.steps, tell=console
                )
            console.print(rows_table(outcomes[name].rows, title=name))
    except ShoalError as error:
        return show_failure(error)
    finally:
        console.print(bars_table(outcomes))
    return 0 if all(verdict.met for outcome in outcomes.values() for verdict in outcome.verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
