"""Cut a chain of layers into consecutive stages of nearly equal cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from shoal.errors import SpecError


def split_chain(costs: Sequence[float], stages: int, crossings: Sequence[float] | None = None) -> tuple[int, ...]:
    """How many links each stage has, so that the most expensive stage is as cheap as can be.

    `crossings`: what a cut before each link costs the stages on both of its sides; infinity where none may be.
    By dynamic programming: the best cut of the first `i` links into `k` stages extends a best cut of fewer.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise SpecError(
            f"pipeline: {stages} stages were asked for, but the model has {count} layers that can be told apart; "
            "use fewer workers or fewer stages per worker."
        )
    crossing = [0.0, *(crossings[1:] if crossings is not None else [0.0] * (count - 1)), 0.0]
    until = list(accumulate(costs, initial=0.0))
    worst = [[float("inf")] * (count + 1) for _ in range(stages + 1)]
    start = [[0] * (count + 1) for _ in range(stages + 1)]
    worst[0][0] = 0.0
    for stage in range(1, stages + 1):
        for stop in range(stage, count + 1):
            for first in range(stage - 1, stop):
                cost = crossing[first] + until[stop] - until[first] + crossing[stop]
                found = max(worst[stage - 1][first], cost)
                if found < worst[stage][stop]:
                    worst[stage][stop], start[stage][stop] = found, first
    if worst[stages][count] == float("inf"):
        raise SpecError(
            f"pipeline: the model cannot be cut into {stages} stages, as what crosses its layers cannot be sent "
            "from one worker to another; use fewer workers, or sharded or data."
        )
    counts: list[int] = []
    stop = count
    for stage in range(stages, 0, -1):
        counts.append(stop - start[stage][stop])
        stop = start[stage][stop]
    return tuple(reversed(counts))
