"""What noise costs: epsilon from `dp-accounting`, and the noise or the number of rounds that an epsilon allows.

A round adds Gaussian noise to a sum to which everybody, a sample or a client, adds at most `clip`. Who has a part
in it is drawn anew in each round:

- `poisson`: everybody by its own chance. Datasets are neighbours if one has somebody more than the other; the
  library's privacy loss distributions are tight.
- `fixed`: always as many, out of all. Datasets are neighbours if one differs in somebody, whose part can then
  change by twice the clip; the library's Rényi bound for sampling without replacement, which is not tight.

Where everybody has a part in each round both are the plain Gaussian mechanism; who is taken out adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shoal.errors import ProtocolError, SpecError

_STATED, _SEARCHED = 1e-4, 1e-3
"""How finely privacy losses are told apart: where epsilon is stated (as the library does), and in a search."""
_CLOSE_ENOUGH = 1e-3
"""A search for the noise ends when it is known up to this share of it."""
_MOST_NOISE = 1e6
_SAMPLINGS = ("poisson", "fixed")


@dataclass(frozen=True, kw_only=True)
class NoiseRounds:
    """So many rounds with the same noise, in each of which `chosen` of `total` have a part (in the mean)."""

    noise: float
    """Its standard deviation, in multiples of what one may add at most."""
    chosen: int
    total: int
    count: int
    sampling: str = "poisson"

    @property
    def rate(self) -> float:
        """The chance of each to have a part in a round."""
        return min(1.0, self.chosen / self.total)

    def plain(self) -> dict[str, Any]:
        """Plain data that `from_plain` reads."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Any) -> NoiseRounds:
        """The rounds that `plain` wrote; `ProtocolError` for anything else."""
        match plain:
            case {
                "noise": int(noise) | float(noise),
                "chosen": int(chosen),
                "total": int(total),
                "count": int(count),
                "sampling": str(sampling),
            } if noise > 0 and total > 0 and chosen > 0 and count >= 0 and sampling in _SAMPLINGS:
                return cls(noise=noise, chosen=chosen, total=total, count=count, sampling=sampling)
        raise ProtocolError("What should be rounds of noise has no noise, chosen, total, count and sampling.")


def epsilon_of(spent: Sequence[NoiseRounds], delta: float) -> float:
    """What these rounds have spent together."""
    return _epsilon(spent, delta, _STATED)


def accountant_of(spent: Sequence[NoiseRounds]) -> str:
    """Who counts them, in words."""
    version = getattr(_library(), "__version__", "") or _version()
    kind = "Rényi divergence, without replacement" if _is_fixed(spent) else "privacy loss distribution"
    return f"dp-accounting {version}, {kind}"


def noise_for(epsilon: float, delta: float, spent: Sequence[NoiseRounds], coming: NoiseRounds) -> float:
    """The least noise with which the coming rounds, after those that were, spend at most epsilon."""

    def spends(noise: float) -> float:
        return _epsilon([*spent, replace(coming, noise=noise)], delta, _SEARCHED)

    low, high = 0.0, 1.0
    while spends(high) > epsilon:
        low, high = high, 2 * high
        if high > _MOST_NOISE:
            raise SpecError(
                f"privacy: no noise lets {coming.count} rounds stay within epsilon={epsilon:g}, delta={delta:g}; "
                "ask for a larger epsilon, or a shorter run."
            )
    while high - low > _CLOSE_ENOUGH * high:
        middle = (low + high) / 2
        # Little noise has no finite epsilon worth computing.
        low, high = (low, middle) if middle > 0.05 and spends(middle) <= epsilon else (middle, high)
    return high


def rounds_within(epsilon: float, delta: float, spent: Sequence[NoiseRounds], coming: NoiseRounds) -> int:
    """How many of the coming rounds can be taken before more than epsilon is spent."""

    def fits(count: int, interval: float = _SEARCHED) -> bool:
        return _epsilon([*spent, replace(coming, count=count)], delta, interval) <= epsilon

    if fits(coming.count):
        return coming.count
    count = _last_that(fits, coming.count)
    while count < coming.count and fits(count + 1, _STATED):  # what is stated may be a little less
        count += 1
    return count


def _last_that(fits: Callable[[int], bool], most: int) -> int:
    """The largest number below `most` that fits, of those that are as all smaller ones; 0 where none does."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _is_fixed(spent: Sequence[NoiseRounds]) -> bool:
    return any(each.sampling == "fixed" and each.rate < 1 for each in spent)


def _epsilon(spent: Sequence[NoiseRounds], delta: float, interval: float) -> float:
    library = _library()
    counted = _merged(spent)
    if not counted:
        return 0.0
    if _is_fixed(counted):
        accountant = library.rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)
    else:
        accountant = library.pld.PLDAccountant(value_discretization_interval=interval)
    for each in counted:
        accountant.compose(_event(library, each, halves=_is_fixed(counted)), each.count)
    return float(accountant.get_epsilon(delta))


def _merged(spent: Sequence[NoiseRounds]) -> list[NoiseRounds]:
    """The same, with rounds that are alike counted together: a resumed run comes to what an unbroken one does."""
    found: dict[NoiseRounds, int] = {}
    for each in spent:
        alike = replace(each, count=0)
        found[alike] = found.get(alike, 0) + each.count
    return [replace(each, count=count) for each, count in found.items() if count]


def _event(library: Any, rounds: NoiseRounds, *, halves: bool) -> Any:
    if halves:  # who differs takes away what it added, and adds something else: twice the clip
        if rounds.sampling != "fixed":
            raise SpecError(
                "privacy: rounds that draw everybody by its own chance cannot be counted together with rounds of "
                "a fixed number; begin anew."
            )
        noise = library.GaussianDpEvent(rounds.noise / 2)
        return library.SampledWithoutReplacementDpEvent(rounds.total, min(rounds.chosen, rounds.total), noise)
    noise = library.GaussianDpEvent(rounds.noise)
    return noise if rounds.rate == 1 else library.PoissonSampledDpEvent(rounds.rate, noise)


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError:
        raise SpecError(
            "privacy: what noise costs is counted by dp-accounting, which is not installed; run pip install "
            "shoal[privacy]."
        ) from None
    return dp_accounting


def _version() -> str:
    from importlib.metadata import version

    return version("dp-accounting")
