"""Cut a chain of layers into consecutive stages of nearly equal cost."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import accumulate

from shoal.errors import SpecError

NEVER = float("inf")

StageCost = Callable[[int, int, int], float]
"""What a stage of this number costs that has the links from one number to before another."""
StageTest = Callable[[int, int, int], bool]
"""Whether there may be such a stage."""


def split_chain(
    costs: Sequence[float],
    stages: int,
    crossings: Sequence[float] | None = None,
    *,
    fits: StageTest | None = None,
    sizes: StageCost | None = None,
    slack: float = 0.0,
) -> tuple[int, ...] | None:
    """How many links each stage has, so that the most expensive stage is as cheap as can be; None where each split
    has a stage that does not fit.

    `crossings`: what a cut before each link costs the stages on both of its sides; `NEVER` where none may be.
    `sizes`: how large stages are. Of splits that cost no more than the cheapest and this share `slack` of it, that
    one is taken whose largest stage is smallest, and of those the one over whose cuts the least travels: what was
    measured differs from run to run by more than such splits do.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise SpecError(
            f"pipeline: {stages} stages were asked for, but the model has {count} "
            f"layer{'s' * (count != 1)} that can be told apart; "
            "use fewer workers or fewer stages per worker."
        )
    crossing = [0.0, *(crossings[1:] if crossings is not None else [0.0] * (count - 1)), 0.0]
    until = list(accumulate(costs, initial=0.0))

    def cost(_: int, first: int, stop: int) -> float:
        return crossing[first] + until[stop] - until[first] + crossing[stop]

    if _least_worst(cost, count, stages)[0] == NEVER:
        raise SpecError(
            f"pipeline: the model cannot be cut into {stages} stages, as what crosses its layers cannot be sent "
            "from one worker to another; use fewer workers, or sharded or data."
        )
    fits = fits or (lambda *_: True)
    lowest, counts = _least_worst(_where(fits, cost), count, stages)
    if lowest == NEVER:
        return None
    if sizes is not None and slack:
        near = _where(lambda *stage: fits(*stage) and cost(*stage) <= lowest * (1 + slack), sizes)
        smallest, _ = _least_worst(near, count, stages)
        travelling = _where(lambda *stage: near(*stage) <= smallest, lambda stage, first, stop: crossing[first])
        _, counts = _best(travelling, count, stages, operator.add)
    return counts


def _least_worst(cost: StageCost, count: int, stages: int) -> tuple[float, tuple[int, ...]]:
    """What the most expensive stage costs at least, and how many links each stage then has."""
    return _best(cost, count, stages, max)


def _where(allowed: StageTest, cost: StageCost) -> StageCost:
    """The same cost, and `NEVER` for stages that may not be."""
    return lambda stage, first, stop: cost(stage, first, stop) if allowed(stage, first, stop) else NEVER


def _best(
    cost: StageCost, count: int, stages: int, together: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """By dynamic programming: the best cut of the first `i` links into `k` stages extends a best cut of fewer."""
    total = [[NEVER] * (count + 1) for _ in range(stages + 1)]
    start = [[0] * (count + 1) for _ in range(stages + 1)]
    total[0][0] = 0.0
    for stage in range(1, stages + 1):
        for stop in range(stage, count + 1):
            for first in range(stage - 1, stop):
                before = total[stage - 1][first]
                if before < total[stage][stop]:
                    found = together(before, cost(stage - 1, first, stop))
                    if found < total[stage][stop]:
                        total[stage][stop], start[stage][stop] = found, first
    counts: list[int] = []
    stop = count
    for stage in range(stages, 0, -1):
        counts.append(stop - start[stage][stop])
        stop = start[stage][stop]
    return total[stages][count], tuple(reversed(counts))
