"""`shoal bench`: how fast is it here, beside its peers?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.json_output import print_json
from shoal.errors import unknown

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.bench import BarClaim, BarFinding, BarVerdict, Measurement, SpeedRow
    from shoal.bench.memory import Footprint
    from shoal.bench.ordeal import Ordeal

MODELS = ("mlp", "gpt", "conv", "digits")
STARTUP_PROCESSES = (2, 4)
FEWER_ROUNDS = 3
"""For comparisons whose ratios are large and whose runs are long: TensorFlow's start, waits for stragglers."""


def bench(
    models: Annotated[str, typer.Option(help="Which models, with commas.")] = ",".join(MODELS),
    rounds: Annotated[int, typer.Option(help="Measure each variant so often, in turn.")] = 3,
    steps: Annotated[
        int | None, typer.Option(help="Measured steps of a run; default the model's own number.")
    ] = None,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Measure the start-up, too.")] = True,
    stragglers: Annotated[
        bool, typer.Option("--stragglers/--no-stragglers", help="Compare who waits for slow workers, too.")
    ] = True,
    chaos: Annotated[
        bool, typer.Option("--chaos/--no-chaos", help="Train while workers and servers are killed, too.")
    ] = True,
    chaos_seconds: Annotated[
        float, typer.Option(help="How long each run under faults takes, and each one beside it.", min=1.0)
    ] = 180.0,
    chaos_every: Annotated[float, typer.Option(help="Seconds from one fault to the next.", min=1.0)] = 10.0,
    chaos_runs: Annotated[
        str, typer.Option(help="Which runs under faults, with commas: kills, torchrun, all, servers.")
    ] = "kills,torchrun,all,servers",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as one JSON object and nothing else.")
    ] = False,
) -> None:
    """Measure training beside DDP, TensorFlow and a loop written by hand; fresh processes, variants in turn.

    The exit status is 1 where a promised ratio is missed.

    [dim]shoal bench
    shoal bench --models mlp --rounds 3 --no-start --no-stragglers
    shoal bench --models "" --no-start --no-chaos
    shoal bench --models "" --no-start --no-stragglers --chaos-seconds 40
    shoal bench --models "" --no-start --no-stragglers --chaos-seconds 1800 --chaos-every 9 --chaos-runs all[/dim]
    """
    from rich.console import Console

    from shoal.bench.chaos import RUNS

    chosen = _chosen(models, "model", MODELS)
    under_faults = _chosen(chaos_runs, "run under faults", RUNS) if chaos else []
    session = _Session(Console(stderr=as_json, highlight=False))
    for name in chosen:
        session.measure_training(name, rounds, steps)
        session.measure_trainer(name, rounds, steps)
    if "mlp" in chosen:
        session.measure_servers(min(rounds, FEWER_ROUNDS), steps)
        session.measure_memory()
        session.measure_bandwidth(rounds)
        session.measure_checkpoints(min(rounds, FEWER_ROUNDS))
    if stragglers:
        session.measure_stragglers(min(rounds, FEWER_ROUNDS), steps)
    if chaos:
        session.measure_chaos(chaos_seconds, chaos_every, under_faults)
    if start:
        session.measure_startup(rounds)
    if as_json:
        print_json(session.to_dict())
    else:
        session.show()
    if not all(verdict.met for verdict in session.verdicts):
        raise typer.Exit(1)


def _chosen(text: str, kind: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise unknown(f"bench: {kind}", name, known)
    return names


@dataclass
class _Session:
    """What has been measured so far."""

    console: Console
    rows: dict[str, list[SpeedRow]] = field(default_factory=dict)
    """By comparison: only rows of one were measured side by side."""
    verdicts: list[BarVerdict | BarFinding | BarClaim] = field(default_factory=list)
    ordeals: list[Ordeal] = field(default_factory=list)
    footprint: Footprint | None = None

    def measure_training(self, model: str, rounds: int, steps: int | None) -> None:
        from shoal.bench import compare, judge

        names = ["ddp", "ddp_tuned", "data"]
        if model == "mlp":
            names += ["single", "data_without_journal"]
        rows = compare(model, names, rounds=rounds, steps=steps, on_measured=self._tell)
        self._keep("Speed", rows, judge(rows))

    def measure_servers(self, rounds: int, steps: int | None) -> None:
        from shoal.bench import compare, judge

        names = ["ddp", *self._tensorflow_variants(), "ps_asp", "ps_asp_2", "ps_bsp"]
        rows = compare("mlp", names, rounds=rounds, steps=steps, on_measured=self._tell)
        self._keep("Parameter servers", rows, judge(rows))

    def measure_stragglers(self, rounds: int, steps: int | None) -> None:
        from shoal.bench.contests import compare_stragglers

        rows, verdicts = compare_stragglers(rounds=rounds, steps=steps, on_measured=self._tell)
        self._keep("With a slow worker", rows, verdicts)

    def _keep(self, comparison: str, rows: list[SpeedRow], verdicts: Sequence[BarVerdict | BarFinding]) -> None:
        self.rows.setdefault(comparison, []).extend(rows)
        self.verdicts += verdicts

    def _tensorflow_variants(self) -> list[str]:
        """TensorFlow's rows where it is installed, else one line that says how to get them."""
        from shoal.bench.environment import HINT, tensorflow_python
        from shoal.bench.variants import TENSORFLOW_OPTIONS

        if tensorflow_python() is not None:
            return list(TENSORFLOW_OPTIONS)
        self.console.print(f"TensorFlow's parameter server is left out: {HINT}.", style="dim")
        return []

    def measure_trainer(self, model: str, rounds: int, steps: int | None) -> None:
        from shoal.bench.trainer_overhead import compare_trainer

        if model == "conv":
            return
        rows, verdicts = compare_trainer(model, rounds=rounds, steps=steps, on_measured=self._tell)
        self._keep("Speed", rows, verdicts)

    def measure_memory(self) -> None:
        from shoal.bench.memory import measure_memory
        from shoal.observe.wording import memory

        self.footprint = found = measure_memory()
        self.verdicts.append(found.finding())
        self.console.print(
            f"mlp memory of 4 workers: {memory(found.arena)} shared, {memory(found.total)} in all; "
            f"private copies would take {memory(found.private_copies)}",
            style="dim",
        )

    def measure_bandwidth(self, rounds: int) -> None:
        from shoal.bench.bandwidth import measure_bandwidth

        self.verdicts += measure_bandwidth(rounds, self._tell_bandwidth)

    def measure_checkpoints(self, rounds: int) -> None:
        from shoal.bench.overheads import measure_books, measure_checkpoints

        self.verdicts += measure_checkpoints(rounds, on_measured=self._tell_speed)
        self.verdicts.append(measure_books(rounds, on_measured=self._tell_speed))

    def measure_chaos(self, seconds: float, every_s: float, runs: Sequence[str]) -> None:
        from shoal.bench.chaos import compare_under_faults

        ordeals, verdicts = compare_under_faults(
            seconds, every_s=every_s, runs=runs, on_measured=self._tell_ordeal
        )
        self.ordeals += ordeals
        self.verdicts += verdicts

    def measure_startup(self, rounds: int) -> None:
        from shoal.bench.startup import measure_startup

        for processes in STARTUP_PROCESSES:
            self.verdicts.append(measure_startup(processes, rounds, self._tell_start))

    def show(self) -> None:
        from shoal.bench import ordeals_table, rows_table, verdicts_table

        for comparison, rows in self.rows.items():
            self.console.print(rows_table(rows, title=comparison))
        if self.ordeals:
            self.console.print(ordeals_table(self.ordeals))
        self.console.print(verdicts_table(self.verdicts))

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": {comparison: [asdict(row) for row in rows] for comparison, rows in self.rows.items()},
            "verdicts": [{**asdict(verdict), "met": verdict.met} for verdict in self.verdicts],
            "chaos": [asdict(ordeal) for ordeal in self.ordeals],
            "memory": None if self.footprint is None else asdict(self.footprint),
        }

    def _tell(self, run: Measurement) -> None:
        self.console.print(
            f"{run.model:<7} {run.variant:<21} {run.step_s * 1e3:>9.2f} ms  {run.samples_per_s:>9,.0f} samples/s",
            style="dim",
        )

    def _tell_ordeal(self, ordeal: Ordeal) -> None:
        self.console.print(
            f"{ordeal.name:<31}{sum(ordeal.faults.values()):>3} faults  {ordeal.kept:>6.1%} kept, "
            f"{ordeal.kept_by_timeline:.1%} by its timeline  "
            f"next step {ordeal.to_next_step_s:>5.2f} s",
            style="dim",
        )

    def _tell_speed(self, name: str, samples_per_s: float) -> None:
        self.console.print(f"{name:<38} {samples_per_s:>9,.0f} samples/s in all", style="dim")

    def _tell_bandwidth(self, name: str, bytes_per_s: float) -> None:
        self.console.print(f"bandwidth: {name:<25} {bytes_per_s / 1e9:>6.2f} GB/s", style="dim")

    def _tell_start(self, name: str, seconds: float) -> None:
        self.console.print(f"first step: {name:<20} {seconds:>7.2f} s", style="dim")
