"""`python -m benchmarks`: how fast is Shoal here, beside its peers?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.chaos import RUNS
from benchmarks.session import Session
from shoal.cli.failures import show_failure
from shoal.cli.json_output import print_json
from shoal.errors import ShoalError, unknown

MODELS = ("mlp", "gpt", "conv", "digits")
FEWER_ROUNDS = 3
"""For comparisons whose ratios are large and whose runs are long: TensorFlow's start, waits for stragglers."""

app = typer.Typer(name="benchmarks", add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.command()
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

    [dim]python -m benchmarks
    python -m benchmarks --models mlp --rounds 3 --no-start --no-stragglers
    python -m benchmarks --models "" --no-start --no-chaos
    python -m benchmarks --models "" --no-start --no-stragglers --chaos-seconds 40
    python -m benchmarks --models "" --no-start --no-stragglers --chaos-seconds 1800 --chaos-runs all[/dim]
    """
    chosen = _chosen(models, "model", MODELS)
    under_faults = _chosen(chaos_runs, "run under faults", RUNS) if chaos else []
    session = Session(Console(stderr=as_json, highlight=False))
    for name in chosen:
        session.measure_training(name, rounds, steps)
        session.measure_trainer(name, rounds, steps)
    if "mlp" in chosen:
        session.measure_servers(min(rounds, FEWER_ROUNDS), steps)
        session.measure_memory()
        session.measure_bandwidth(rounds)
        session.measure_checkpoints(min(rounds, FEWER_ROUNDS))
        session.measure_reading(rounds)
    if "digits" in chosen:
        session.measure_watching(rounds)
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


def main() -> int:
    """Run the command line; its exit status."""
    try:
        app()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except ShoalError as error:
        return show_failure(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
