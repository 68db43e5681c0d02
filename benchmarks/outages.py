"""What faults cost, read off the timeline of a run: no processes, no clock."""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.measurement import Timeline

AFTERMATH_S = 2.0
"""For so long after a run goes on, what is missing is put down to the fault: a new spare's start takes time from
all."""

AROUND_S = 30.0
"""So far around a fault the run's pace is taken from: what others do on the machine changes it within minutes."""

PAUSE = 3.0
"""A step that takes so many times what is usual is none."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A fault that came to pass."""

    time: float
    """Seconds since 1970."""
    kind: str
    seconds: float = 0.0
    """How long it lasts by itself, as a slow-down does."""
    due_s: float = 0.0
    """So much of that is lost whatever one does."""


@dataclass(frozen=True, kw_only=True)
class Outage:
    """What one fault cost."""

    kind: str
    to_next_step_s: float
    """From the fault to the next committed step."""
    lost_s: float
    """Time in which nothing was committed that would have been without the fault."""
    due_s: float = 0.0
    """What of it nobody could have saved: workers in lockstep wait for the one that is slow."""


@dataclass(frozen=True)
class _Gap:
    """From one commit to the next."""

    begin: float
    end: float
    steps: float
    """How much of a step of all workers was committed at its end."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def find_outages(timeline: Timeline, strikes: Sequence[Strike], batch: int) -> list[Outage]:
    """What each fault cost; those after the last commit cost nothing and are left out."""
    gaps = [_Gap(t0, t1, (s1 - s0) / batch) for (t0, s0), (t1, s1) in itertools.pairwise(timeline)]
    if not gaps or not strikes:
        return []
    gap_ends = [gap.end for gap in gaps]
    ordered = sorted(strikes, key=lambda strike: strike.time)
    ends = [*(strike.time for strike in ordered[1:]), timeline[-1][0]]
    found = []
    affected = [
        _affected(strike, gaps[bisect(gap_ends, strike.time) :], end)
        for strike, end in zip(ordered, ends, strict=True)
    ]
    struck = {id(gap) for hit in affected for gap in hit}
    for strike, hit in zip(ordered, affected, strict=True):
        if hit:
            begin, stop = (bisect(gap_ends, strike.time + side) for side in (-AROUND_S, AROUND_S))
            around = gaps[begin:stop] or hit[:1]
            calm = [gap for gap in around if id(gap) not in struck]
            found.append(_outage(strike, hit, _pace_s(calm or around)))
    return found


def _pace_s(calm: Sequence[_Gap]) -> float:
    """Seconds of a step in which no fault had a hand: the mean, for that is what the same time would have brought.

    Steps are never much shorter than usual, but some are longer: by their median any time looks like a loss.
    Pauses of which nobody knows why are left out.
    """
    most_s = PAUSE * statistics.median(gap.seconds / gap.steps for gap in calm)
    usual = [gap for gap in calm if gap.seconds <= most_s * gap.steps]
    return sum(gap.seconds for gap in usual) / sum(gap.steps for gap in usual)


def _affected(strike: Strike, after: Sequence[_Gap], end: float) -> Sequence[_Gap]:
    """What follows a fault, until it is over and its aftermath, too."""
    if not after:
        return ()
    stall = _stall(after)
    until = stall.end + strike.seconds + AFTERMATH_S
    # The gap in which the next fault comes is that one's.
    return [gap for gap in after if gap.begin < until and gap.end <= max(end, stall.end)]


def _stall(after: Sequence[_Gap]) -> _Gap:
    """The fault's own gap. A step that all had done may be told of after it: then it is the one behind."""
    return max(after[:2], key=lambda gap: gap.seconds)


def _outage(strike: Strike, affected: Sequence[_Gap], pace_s: float) -> Outage:
    stall = _stall(affected)
    return Outage(
        kind=strike.kind,
        to_next_step_s=stall.end - strike.time,
        lost_s=sum(gap.seconds - gap.steps * pace_s for gap in affected),
        due_s=strike.due_s,
    )
