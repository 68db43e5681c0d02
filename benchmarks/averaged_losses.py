"""What agreeing seldom costs: `python -m benchmarks.averaged_losses [STRATEGY …]`.

The GPT of `examples/gpt.py` is trained on the same samples in lockstep and under averaging, with two workers each,
and their test losses are compared: those with a promise must come within 2% of the synchronous one, with a
sixteenth of the agreements. Each has a learning rate that suits it; of the synchronous ones the best counts. As a
worker has half of each batch, it is long runs that show what averaging comes to: so the GPT is a narrow one,
unless `--width`, `--depth` and `--context` say otherwise.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shoal.cli.failures import show_failure
from shoal.errors import ShoalError
from shoal.launch.runs import train

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"
SYNCHRONOUS, WORKERS, MOST_WORSE = "data", 2, 1.02
SYNCHRONOUS_RATES = (2e-3, 4e-3, 8e-3)
STRATEGIES = {
    "H=16": ("average:every=16", 8e-3),
    "DiLoCo": ("average:every=16,outer=nesterov", 2e-3),
    "streamed": ("average:every=16,outer=nesterov,parts=4,delay=4", 2e-3),
}
"""By variant: what is written, and the workers' learning rate."""
PROMISED = ("H=16", "DiLoCo")


def trained(strategy: str, rate: float, args: dict[str, int], seed: int, folder: Path) -> dict[str, Any]:
    """The results of a run."""
    run = train(
        f"{EXAMPLE}:task",
        cluster={"workers": WORKERS, "threads": 1},
        strategy=strategy,
        args={**args, "lr": rate},
        seed=seed,
        evaluate_every=args["steps"],
        runs=folder,
        progress=False,
        output=StringIO(),
    )
    return dict(run.results)


def main(argv: Sequence[str]) -> int:
    """Train, print; the exit status is 1 where a promise was not kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.averaged_losses", description=__doc__)
    parser.add_argument("variants", nargs="*", help=f"of {', '.join(STRATEGIES)}; default all")
    sizes = {"steps": 9000, "width": 64, "depth": 2, "context": 64}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=SYNCHRONOUS_RATES, help="of the synchronous runs"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    args, seed = {name: getattr(arguments, name) for name in sizes}, arguments.seed
    console, is_kept, best = Console(highlight=False), True, math.inf
    shown = Table("variant", "strategy", "rate", "test loss", "over synchronous", "agreements", box=None)
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            for rate in arguments.rates:
                loss = trained(SYNCHRONOUS, rate, args, seed, Path(folder))["results"]["loss"]
                shown.add_row("synchronous", SYNCHRONOUS, f"{rate:g}", f"{loss:.4f}", "", str(args["steps"]))
                best = min(best, loss)
            for name in arguments.variants or STRATEGIES:
                strategy, rate = STRATEGIES[name]
                results = trained(strategy, rate, args, seed, Path(folder))
                loss, agreements = results["results"]["loss"], results["agreements"]
                is_kept = is_kept and (name not in PROMISED or loss <= MOST_WORSE * best)
                shown.add_row(name, strategy, f"{rate:g}", f"{loss:.4f}", f"{loss / best:.3f}", str(agreements))
                console.print(shown)
    except ShoalError as error:
        return show_failure(error)
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
