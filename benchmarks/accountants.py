"""What noise costs by other accountants: `python -m benchmarks.accountants`.

Beside `shoal.privacy`, which asks dp-accounting, stand two that others have written: Opacus's (`PRVAccountant`)
and Microsoft's `prv_accountant`. Both compose privacy loss random variables after Gopi and others (2021),
dp-accounting privacy loss distributions after Koskela and others (2020). They are in no extra: install them with
`pip install --no-deps --target DIR opacus prv-accountant opt_einsum`, and set `PYTHONPATH=DIR`. Ends with 1
where one is more than 2% away.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from shoal.cli.failures import show_failure
from shoal.errors import LaunchError, ShoalError
from shoal.privacy import NoiseRounds, epsilon_of

TOTAL, FARTHEST = 1_000_000, 0.02
CASES = (
    (1.0, 10_000, 1_000, 1e-5),
    (0.8, 44_500, 115, 1e-5),
    (1.1, 4_267, 14_063, 1e-5),
    (2.0, 100_000, 500, 1e-6),
    (0.6, 1_000, 5_000, 1e-5),
)
"""Noise, samples of a step in the mean out of `TOTAL`, steps, delta."""
Epsilon = Callable[[float, float, int, float], float]
"""From noise, rate, steps and delta."""


def other_accountants() -> dict[str, Epsilon]:
    """By name: those that are not ours."""
    try:
        from opacus.accountants import PRVAccountant as Opacus
        from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant
    except ImportError as error:
        raise LaunchError(
            f"accountants: {error.name} is not installed; run pip install --no-deps --target DIR opacus "
            "prv-accountant opt_einsum, and set PYTHONPATH=DIR."
        ) from None

    def by_opacus(noise: float, rate: float, steps: int, delta: float) -> float:
        accountant = Opacus()
        accountant.history = [(noise, rate, steps)]
        return float(accountant.get_epsilon(delta))

    def by_prv(noise: float, rate: float, steps: int, delta: float) -> float:
        mechanism = PoissonSubsampledGaussianMechanism(noise_multiplier=noise, sampling_probability=rate)
        accountant = PRVAccountant(
            prvs=mechanism, max_self_compositions=steps, eps_error=0.01, delta_error=delta / 1000
        )
        return float(accountant.compute_epsilon(delta=delta, num_self_compositions=steps)[1])

    return {"opacus": by_opacus, "prv_accountant": by_prv}


def compare(console: Console) -> bool:
    """Print the table; whether all are close."""
    others, worst = other_accountants(), 0.0
    table = Table("noise", "rate", "steps", "delta", "shoal", *others, title="epsilon")
    for noise, chosen, steps, delta in CASES:
        own = epsilon_of([NoiseRounds(noise=noise, chosen=chosen, total=TOTAL, count=steps)], delta)
        row = [f"{noise:g}", f"{chosen / TOTAL:g}", f"{steps:,}", f"{delta:g}", f"{own:.4f}"]
        for epsilon in others.values():
            found = epsilon(noise, chosen / TOTAL, steps, delta)
            away = found / own - 1
            worst = max(worst, abs(away))
            row.append(f"{found:.4f} ({away:+.2%})")
        table.add_row(*row)
    console.print(table)
    console.print(f"at most {worst:.2%} away, {'within' if worst <= FARTHEST else 'NOT within'} {FARTHEST:.0%}")
    return worst <= FARTHEST


def main() -> int:
    """The table, and the exit status."""
    warnings.filterwarnings("ignore")
    try:
        return 0 if compare(Console(highlight=False)) else 1
    except ShoalError as error:
        return show_failure(error)


if __name__ == "__main__":
    sys.exit(main())
