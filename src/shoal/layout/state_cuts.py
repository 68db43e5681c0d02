"""Which worker keeps which elements of a model's parameters, where each keeps only a part of them.

The parameters of a unit (a block of layers that is gathered at once) lie end to end in one vector, in such an
order that what a worker keeps is one run of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from shoal.errors import SpecError

_Owners = Callable[[Sequence["CutParameter"]], list[int]]


@dataclass(frozen=True, kw_only=True)
class CutParameter:
    """One parameter of a unit."""

    layer: str
    """The module that it belongs to: parameters of one layer may have to stay together."""
    numel: int


@dataclass(frozen=True, kw_only=True)
class StateCut:
    """How a unit's parameters lie in its vector, and who keeps what of it."""

    starts: tuple[int, ...]
    """By parameter: where it begins."""
    numels: tuple[int, ...]
    """By parameter: how long it is."""
    bounds: tuple[int, ...]
    """Worker w keeps the vector from bounds[w] to bounds[w + 1]."""

    def span(self, param: int, worker: int) -> tuple[int, int]:
        """The elements of a parameter, counted from its beginning, that a worker keeps; (0, 0) for none."""
        start, numel = self.starts[param], self.numels[param]
        first = max(0, self.bounds[worker] - start)
        last = min(numel, self.bounds[worker + 1] - start)
        return (first, last) if first < last else (0, 0)


def cut_state(
    units: Sequence[Sequence[CutParameter]], *, workers: int, policy: str = "size", capacities: str = "even"
) -> list[StateCut]:
    """Cut every unit; the same arguments give the same answer everywhere.

    `size` gives every worker as many elements of each unit, `device` as many as its capacity says. `count` and
    `layer` keep parameters or layers whole; what one unit gives a worker too much, the next ones make up for.
    """
    if policy in ("size", "device"):
        shares = _shares(workers, capacities)
        return [_cut_anywhere(params, shares) for params in units]
    owners = _by_count(workers) if policy == "count" else _by_layer(workers)
    return [_cut_between(params, owners(params), workers) for params in units]


def _shares(workers: int, capacities: str) -> list[Fraction]:
    """The part of the whole that lies before each worker's part, and the whole."""
    sizes = [Fraction(1)] * workers if capacities == "even" else [Fraction(size) for size in capacities.split("+")]
    if not sum(sizes):
        raise SpecError(f"capacities={capacities} leave nobody to keep anything; write for instance 2+1.")
    return [size / sum(sizes) for size in (Fraction(0), *accumulate(sizes))]


def _cut_anywhere(params: Sequence[CutParameter], shares: Sequence[Fraction]) -> StateCut:
    numels = tuple(param.numel for param in params)
    bounds = tuple(int(share * sum(numels)) for share in shares)
    return StateCut(starts=tuple(accumulate(numels, initial=0))[:-1], numels=numels, bounds=bounds)


def _cut_between(params: Sequence[CutParameter], owners: Sequence[int], workers: int) -> StateCut:
    """Everything of one owner lies together."""
    starts, bounds, end = [0] * len(params), [0], 0
    for worker in range(workers):
        for number, param in enumerate(params):
            if owners[number] == worker:
                starts[number] = end
                end += param.numel
        bounds.append(end)
    return StateCut(starts=tuple(starts), numels=tuple(param.numel for param in params), bounds=tuple(bounds))


def _by_count(workers: int) -> _Owners:
    """Each parameter goes to whoever keeps the fewest, and of these to the one with the fewest elements."""
    kept = [(0, 0, worker) for worker in range(workers)]

    def owners(params: Sequence[CutParameter]) -> list[int]:
        found = []
        for param in params:
            count, numel, worker = min(kept)
            kept[worker] = (count + 1, numel + param.numel, worker)
            found.append(worker)
        return found

    return owners


def _by_layer(workers: int) -> _Owners:
    """Each layer, the largest of a unit first, goes to whoever keeps the fewest elements."""
    kept = [0] * workers

    def owners(params: Sequence[CutParameter]) -> list[int]:
        numels: dict[str, int] = defaultdict(int)
        for param in params:
            numels[param.layer] += param.numel
        owner: dict[str, int] = {}
        for layer in sorted(numels, key=lambda layer: -numels[layer]):
            owner[layer] = kept.index(min(kept))
            kept[owner[layer]] += numels[layer]
        return [owner[param.layer] for param in params]

    return owners
