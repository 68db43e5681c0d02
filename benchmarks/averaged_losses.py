"""What agreeing seldom costs: `python -m benchmarks.averaged_losses [STRATEGY …]`.

The GPT of `examples/gpt.py` is trained on the same samples in lockstep and under averaging, with two workers each,
and their test losses are compared: those with a promise must come within 2% of the synchronous one, with a
sixteenth of the agreements.
"""

from __future__ import annotations

import argparse
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
STRATEGIES = {
    "H=16": "average:every=16",
    "DiLoCo": "average:every=16,outer=nesterov",
    "streamed": "average:every=16,outer=nesterov,parts=4,delay=4",
}
PROMISED = ("H=16", "DiLoCo")


def trained(strategy: str, steps: int, seed: int, folder: Path) -> dict[str, Any]:
    """The results of a run."""
    run = train(
        f"{EXAMPLE}:task",
        cluster={"workers": WORKERS, "threads": 1},
        strategy=strategy,
        args={"steps": steps},
        seed=seed,
        evaluate_every=steps,
        runs=folder,
        progress=False,
        output=StringIO(),
    )
    return dict(run.results)


def main(argv: Sequence[str]) -> int:
    """Train, print; the exit status is 1 where a promise was not kept."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.averaged_losses", description=__doc__)
    parser.add_argument("variants", nargs="*", help=f"of {', '.join(STRATEGIES)}; default all")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    console, is_kept = Console(highlight=False), True
    shown = Table("variant", "strategy", "test loss", "over synchronous", "agreements", box=None)
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            plain = trained(SYNCHRONOUS, arguments.steps, arguments.seed, Path(folder))["results"]["loss"]
            shown.add_row("synchronous", SYNCHRONOUS, f"{plain:.4f}", "1.000", str(arguments.steps))
            for name in arguments.variants or STRATEGIES:
                results = trained(STRATEGIES[name], arguments.steps, arguments.seed, Path(folder))
                ratio = results["results"]["loss"] / plain
                is_kept = is_kept and (name not in PROMISED or ratio <= MOST_WORSE)
                shown.add_row(
                    name,
                    STRATEGIES[name],
                    f"{results['results']['loss']:.4f}",
                    f"{ratio:.3f}",
                    str(results["agreements"]),
                )
                console.print(shown)
    except ShoalError as error:
        return show_failure(error)
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
