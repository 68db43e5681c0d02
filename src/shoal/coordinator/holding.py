"""Bringing all workers to one border between steps, so that the state there can be saved as a whole.

The first worker asks (`hold`, a number that rises), and says when it is done (`released`). Where cells are
leased, nothing beyond the border is handed out meanwhile. Where every rank has its own cells, workers pause and
say how far they are (`held`: the number, and their clock); the border is then where the furthest is, and all go
on up to it.

Where cells are leased and the steps after which to save are known beforehand, so are the borders: the next one
holds from the beginning, so that nothing beyond it is ever under way, and nobody has to ask. A first worker that
asks all the same wants to save and leave: the border is moved to where all can meet soonest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

DONE = 1 << 62
"""The clock of a worker that has trained on all of its own: no border is before it, so all go on to their end."""
Hold = list[Any]
"""The number of the hold, and its border: of cells where they are leased, else a clock; None: not known yet."""


def next_hold(
    current: Hold | None,
    first: Mapping[str, Any],
    others: Iterable[Mapping[str, Any]],
    lease_border: int | None,
    planned: Sequence[int] = (),
) -> Hold | None:
    """What holds now, from what the first worker and the others last reported; None where nothing does.

    `planned`: all borders that were known when the run began.
    """
    asked, released = _number(first.get("hold")), _number(first.get("released"))
    if current is None:
        return [asked, lease_border] if asked > released else None
    number, border = current
    if released >= number:
        return planned_hold(planned, number)
    if asked > number and lease_border is not None:
        return [asked, min(lease_border, border)]
    if border is None:
        clocks = [_clock_held(facts, number) for facts in (first, *others)]
        if None not in clocks:
            return [number, max(clock for clock in clocks if clock is not None)]
    return current


def planned_hold(planned: Sequence[int], done: int = 0) -> Hold | None:
    """What holds after so many of the planned borders; None where there are no more."""
    return [done + 1, planned[done]] if done < len(planned) else None


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def _clock_held(facts: Mapping[str, Any], number: int) -> int | None:
    if facts.get("done") is True:
        return DONE
    match facts.get("held"):
        case [int(told), int(clock)] if told == number:
            return clock
    return None
