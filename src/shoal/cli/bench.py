"""`shoal bench`: how fast is it here, beside its peers?"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.errors import unknown

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.bench import Finding, Measurement, Row, Verdict
    from shoal.bench.memory import Footprint

MODELS = ("mlp", "gpt", "conv", "digits")
STARTUP_PROCESSES = (2, 4)


def bench(
    models: Annotated[str, typer.Option(help="Which models, with commas.")] = ",".join(MODELS),
    rounds: Annotated[int, typer.Option(help="Measure each variant so often, in turn.")] = 5,
    steps: Annotated[
        int | None, typer.Option(help="Measured steps of a run; default the model's own number.")
    ] = None,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Measure the start-up, too.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as one JSON object and nothing else.")
    ] = False,
) -> None:
    """Measure training beside DDP and a loop written by hand; fresh processes, variants in turn.

    The exit status is 1 where a promised ratio is missed.

    [dim]shoal bench
    shoal bench --models mlp --rounds 3 --no-start[/dim]
    """
    from rich.console import Console

    chosen = [name.strip() for name in models.split(",") if name.strip()]
    for name in chosen:
        if name not in MODELS:
            raise unknown("bench: model", name, MODELS)
    session = _Session(Console(stderr=as_json, highlight=False))
    for name in chosen:
        session.measure_training(name, rounds, steps)
        session.measure_trainer(name, rounds, steps)
    if "mlp" in chosen:
        session.measure_memory()
    if start:
        session.measure_startup(rounds)
    if as_json:
        print(json.dumps(session.to_dict()))
    else:
        session.show()
    if not all(verdict.met for verdict in session.verdicts):
        raise typer.Exit(1)


@dataclass
class _Session:
    """What has been measured so far."""

    console: Console
    rows: list[Row] = field(default_factory=list)
    verdicts: list[Verdict | Finding] = field(default_factory=list)
    footprint: Footprint | None = None

    def measure_training(self, model: str, rounds: int, steps: int | None) -> None:
        from shoal.bench import compare, judge

        names = ["ddp", "ddp_tuned", "data"]
        if model == "mlp":
            names += ["single", "data_without_journal", *self._tensorflow_variants()]
        rows = compare(model, names, rounds=rounds, steps=steps, on_measured=self._tell)
        self.rows += rows
        self.verdicts += judge(rows)

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
        self.rows += rows
        self.verdicts += verdicts

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

    def measure_startup(self, rounds: int) -> None:
        from shoal.bench.startup import measure_startup

        for processes in STARTUP_PROCESSES:
            self.verdicts.append(measure_startup(processes, rounds, self._tell_start))

    def show(self) -> None:
        from shoal.bench import rows_table, verdicts_table

        self.console.print(rows_table(self.rows))
        self.console.print(verdicts_table(self.verdicts))

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": [asdict(row) for row in self.rows],
            "verdicts": [{**asdict(verdict), "met": verdict.met} for verdict in self.verdicts],
            "memory": None if self.footprint is None else asdict(self.footprint),
        }

    def _tell(self, run: Measurement) -> None:
        self.console.print(
            f"{run.model:<7} {run.variant:<21} {run.step_s * 1e3:>9.2f} ms  {run.samples_per_s:>9,.0f} samples/s",
            style="dim",
        )

    def _tell_start(self, name: str, seconds: float) -> None:
        self.console.print(f"first step: {name:<20} {seconds:>7.2f} s", style="dim")
