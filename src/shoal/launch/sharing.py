"""Which places go to whom: pure arithmetic over the places that each process hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

Who = TypeVar("Who")
Places = tuple[int, ...]


def spread(places: int, workers: int) -> list[Places]:
    """Neighbouring places for each of so many workers, as even as can be."""
    return [
        tuple(range(places * number // workers, places * (number + 1) // workers)) for number in range(workers)
    ]


def share_out(places: Sequence[int], hosts: Mapping[Who, Sequence[int]]) -> dict[Who, Places]:
    """Free places for those that go on: each to whoever has the fewest by then."""
    given: dict[Who, list[int]] = {who: [] for who in hosts}
    for place in sorted(places):
        who = min(hosts, key=lambda one: (len(hosts[one]) + len(given[one]), min(hosts[one], default=place)))
        given[who].append(place)
    return {who: tuple(more) for who, more in given.items() if more}


def adopted(hosts: Sequence[Sequence[int]], free: Sequence[int]) -> list[Places]:
    """Who goes on keeps all places, and free ones go to whoever has the fewest by then, of those who stay in the
    order of their first places with it: in that order they meet. So the first has the first place."""
    kept = [list(places) for places in hosts]
    for place in sorted(free):
        able = [number for number in range(len(kept)) if number == 0 or min(kept[number - 1]) < place]
        number = 0 if place == 0 else min(able, key=lambda one: (len(kept[one]), one))
        kept[number].append(place)
    return [tuple(sorted(places)) for places in kept]


def leavers(hosts: Mapping[Who, Sequence[int]], wanted: int) -> list[Who]:
    """Who leaves so that so many stay: those with the highest places. The first place's host stays."""
    return sorted(hosts, key=lambda who: min(hosts[who]))[wanted:]


def gifts(hosts: Mapping[Who, Sequence[int]], newcomers: Sequence[Who]) -> dict[int, tuple[Who, Who]]:
    """By place: who releases it and which newcomer gets it, until all have about the same.

    Whoever has the most gives its highest, so that the first place never moves: for optimizers whose state lies
    with it.
    """
    left = {who: sorted(places) for who, places in hosts.items()}
    got: dict[Who, int] = dict.fromkeys(newcomers, 0)
    moves: dict[int, tuple[Who, Who]] = {}
    while got:
        giver = max(left, key=lambda who: (len(left[who]), left[who][-1]))
        taker = min(got, key=lambda who: got[who])
        if len(left[giver]) <= got[taker] + 1:
            break
        moves[left[giver].pop()] = (giver, taker)
        got[taker] += 1
    return moves
