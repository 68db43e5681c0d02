"""Which places go to whom."""

from __future__ import annotations

import random

from shoal.launch.sharing import adopted, gifts, leavers, share_out, spread


def test_places_are_spread_evenly_and_in_order() -> None:
    assert spread(4, 3) == [(0,), (1,), (2, 3)]
    assert spread(4, 1) == [(0, 1, 2, 3)]
    for places in range(1, 12):
        for workers in range(1, places + 1):
            found = spread(places, workers)
            assert [place for hosted in found for place in hosted] == list(range(places))
            assert max(map(len, found)) - min(map(len, found)) <= 1


def test_free_places_go_to_whoever_has_the_fewest() -> None:
    assert share_out([3], {"a": (0, 1), "b": (2,)}) == {"b": (3,)}
    assert share_out([1, 2, 3], {"a": (0,)}) == {"a": (1, 2, 3)}
    assert share_out([0, 4], {"a": (1, 2), "b": (3,), "c": (5,)}) == {"b": (0,), "c": (4,)}


def test_places_of_those_who_are_lost_are_adopted_and_no_other_moves() -> None:
    assert adopted([(1,), (2,), (3,)], [0]) == [(0, 1), (2,), (3,)], "the first of all has the first place"
    assert adopted([(0, 1), (2,), (3,)], [4, 5]) == [(0, 1), (2, 4), (3, 5)]
    assert adopted([(2,)], [0, 1]) == [(0, 1, 2)]
    assert adopted([(0, 1), (3, 4), (5,)], [2]) == [(0, 1, 2), (3, 4), (5,)], "all stay in their order"
    chance = random.Random(3)
    for _ in range(200):
        deal, places = [(place,) for place in range(8)], set(range(8))
        while len(deal) > 1:
            deal.pop(chance.randrange(len(deal)))
            deal = adopted(deal, sorted(places.difference(*deal)))
            assert deal == sorted(deal) and {place for some in deal for place in some} == places


def test_the_first_place_never_moves() -> None:
    chance = random.Random(3)
    for _ in range(200):
        places, workers = chance.randrange(1, 9), 1
        workers = chance.randrange(1, places + 1)
        hosts = dict(enumerate(spread(places, workers)))
        wanted = chance.randrange(1, places + 1)
        if wanted <= workers:
            assert 0 not in leavers(hosts, wanted) and len(leavers(hosts, wanted)) == workers - wanted
            continue
        newcomers = list(range(workers, wanted))
        moves = gifts(hosts, newcomers)
        assert 0 not in moves
        after = {who: set(own) for who, own in hosts.items()} | {who: set() for who in newcomers}
        for place, (giver, taker) in moves.items():
            after[giver].remove(place)
            after[taker].add(place)
        assert max(map(len, after.values())) - min(map(len, after.values())) <= 1
        assert set.union(*after.values()) == set(range(places))
