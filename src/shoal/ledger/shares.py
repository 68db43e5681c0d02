"""How many samples of a batch each slot gets: evenly, or so that all slots are done together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

TOLERANCE = 0.05
"""Sizes stay while the slowest slot takes at most this much longer than it would with the best sizes."""
DAMPING = 0.5
"""How far sizes move towards the best ones at a time: measured speeds are noisy."""

Sizes = tuple[int, ...]
"""Samples of each slot."""


@cache
def even_sizes(count: int, slots: int) -> Sizes:
    """As equal as can be: they differ by one sample at most."""
    return tuple(count * (slot + 1) // slots - count * slot // slots for slot in range(slots))


def scaled_sizes(count: int, shares: Sequence[float]) -> Sizes:
    """So many samples in these proportions, to the nearest; no slot is empty where there are enough for all."""
    least = min(1, count // len(shares))
    total = sum(shares)
    wanted = [count * share / total for share in shares]
    sizes = [max(least, math.floor(value)) for value in wanted]
    while sum(sizes) > count:
        excess = [n - value if n > least else -math.inf for n, value in _pairs(sizes, wanted)]
        sizes[_last_of_largest(excess)] -= 1
    while sum(sizes) < count:
        sizes[_first_of_largest([value - n for n, value in _pairs(sizes, wanted)])] += 1
    return tuple(sizes)


def best_sizes(count: int, seconds_per_sample: Sequence[float]) -> Sizes:
    """With these the slowest slot is done as early as can be; no slot is empty where there are enough for all."""
    least = min(1, count // len(seconds_per_sample))
    speeds = [1 / seconds for seconds in seconds_per_sample]
    total = sum(speeds)
    sizes = [max(least, math.floor(count * speed / total)) for speed in speeds]
    while sum(sizes) > count:
        times = [n * s if n > least else -math.inf for n, s in _pairs(sizes, seconds_per_sample)]
        sizes[_last_of_largest(times)] -= 1
    while sum(sizes) < count:
        sizes[_first_of_largest([-(n + 1) * s for n, s in _pairs(sizes, seconds_per_sample)])] += 1
    return tuple(sizes)


def sizes_by_speed(count: int, seconds_per_sample: Sequence[float], previous: Sequence[int]) -> Sizes:
    """The next sizes for slots of these speeds: part of the way from the previous sizes to the best ones.

    While the previous ones are nearly as good as the best they stay. A speed that was not measured (zero, or no
    number) leaves them as they are, too.
    """
    now = tuple(previous) if sum(previous) == count else scaled_sizes(count, previous)
    if not all(0 < seconds < math.inf for seconds in seconds_per_sample):
        return now
    best = best_sizes(count, seconds_per_sample)
    if _slowest(now, seconds_per_sample) <= (1 + TOLERANCE) * _slowest(best, seconds_per_sample):
        return now
    nearer = scaled_sizes(count, [size + DAMPING * (goal - size) for size, goal in _pairs(now, best)])
    # Rounding must neither keep sizes that are too far off nor make them worse.
    return nearer if _slowest(nearer, seconds_per_sample) < _slowest(now, seconds_per_sample) else best


def _slowest(sizes: Sequence[int], seconds_per_sample: Sequence[float]) -> float:
    return max(size * seconds for size, seconds in _pairs(sizes, seconds_per_sample))


def _pairs(sizes: Sequence[int], values: Sequence[float]) -> list[tuple[int, float]]:
    return list(zip(sizes, values, strict=True))


def _first_of_largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda slot: (values[slot], -slot))


def _last_of_largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda slot: (values[slot], slot))
