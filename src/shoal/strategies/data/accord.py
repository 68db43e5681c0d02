"""How workers of several hosts go on together when hosts were lost or have come, as a pure function.

A host takes a step once it has the sums of all chunks, never before: so a step either was begun nowhere, and is
made again by those who are there, or some host has all that others may lack. Nobody is further ahead than one
step, or one table, since each needs a part of everybody.

A host on which a worker died alone is *torn*: its memory may hold a step half taken, and some sums are gone with
that worker. It gets the whole state from another, as a host does that has just come. Only where all of it had
taken a step of which nobody else has the sums (they were on their way when the worker died), it is the others who
get its state: nobody has begun the next step, for which all would have had to give their part, so it is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How far one worker had come when it left what it was at."""

    totals: int
    """The last step for which it has the sums of its chunks over all hosts."""
    tables: int
    """The last table that it has whole."""
    taken: int = 0
    """The last step that it has taken, or the one before it in its place."""
    is_guest: bool = False
    """Its host has just come, and has nothing yet; of each host its first worker's word counts."""
    is_torn: bool = False
    """Another worker of its host died alone."""


@dataclass(frozen=True, kw_only=True)
class Accord:
    """What all go on with."""

    step: int
    """The last step that some host has whole: all take it, and none before it."""
    giver: int
    """A host that has its sums, and all of the state."""
    lacking: tuple[int, ...]
    """Hosts that lack some of the sums."""
    guests: tuple[int, ...]
    """Hosts that get everything."""
    table: int
    """The last table that somebody has."""
    table_giver: int
    """A worker that has it."""
    without_table: tuple[int, ...]
    """Workers that lack it."""


def agree(standings: Sequence[Standing], hosts: Sequence[range]) -> Accord:
    """Of how far all workers are, by their numbers; `hosts`: whose are on each."""
    came = {number for number, ranks in enumerate(hosts) if standings[ranks[0]].is_guest}
    torn = {number for number, ranks in enumerate(hosts) if any(standings[rank].is_torn for rank in ranks)} - came
    whole = {
        number: min(standings[rank].totals for rank in ranks)
        for number, ranks in enumerate(hosts)
        if number not in came | torn
    }
    step = max(whole.values())
    for number in torn:
        taken = min(standings[rank].taken for rank in hosts[number])
        if taken > step:
            step, whole = taken, {number: taken}
    old = [rank for number, ranks in enumerate(hosts) if number not in came for rank in ranks]
    table = max(standings[rank].tables for rank in old)
    return Accord(
        step=step,
        giver=min(number for number, totals in whole.items() if totals == step),
        lacking=tuple(number for number, totals in whole.items() if totals < step),
        guests=tuple(number for number in range(len(hosts)) if number not in whole),
        table=table,
        table_giver=min(rank for rank in old if standings[rank].tables == table),
        without_table=tuple(rank for rank in old if standings[rank].tables < table),
    )
