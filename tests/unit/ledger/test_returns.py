"""Clients that nobody waits for: who comes back when, and how old what it brings is then."""

from __future__ import annotations

from collections import Counter

import pytest

from shoal.ledger.returns import Returns
from shoal.spec.clients import ClientRounds


def rounds(clients: int, share: float, buffer: int, oldest: int = 10) -> ClientRounds:
    return ClientRounds.of(
        count=clients, share=share, partition="own", every=1, workers=1, buffer=buffer, oldest=oldest
    )


@pytest.mark.parametrize(("clients", "share", "buffer"), [(20, 0.5, 4), (20, 1.0, 4), (7, 0.2, 1), (5, 1.0, 5)])
def test_nobody_is_in_two_places(clients: int, share: float, buffer: int) -> None:
    found = Returns(rounds(clients, share, buffer, oldest=6), seed=3)
    last: dict[int, int] = {}
    for number in range(200):
        back = found.of(number)
        assert len({each.client for each in back}) == len(back) == buffer
        for each in back:
            assert 0 <= each.age <= 6
            assert number - each.age > last.get(each.client, -1), "it begins after it was merged last"
            last[each.client] = number
    assert found.of(3) == Returns(rounds(clients, share, buffer, oldest=6), seed=3).of(3)
    assert found.mean_age(200) == pytest.approx(
        sum(each.age for n in range(200) for each in found.of(n)) / 200 / buffer
    )


def test_where_all_are_waited_for_nobody_is_older_than_the_others() -> None:
    found = Returns(rounds(5, 1.0, 5), seed=1)
    assert all(each.age == 0 for number in range(20) for each in found.of(number))


def test_slow_clients_come_seldom_and_old_or_are_given_up() -> None:
    patient, strict = (Returns(rounds(12, 1.0, 2, oldest=oldest), seed=5) for oldest in (1000, 4))
    counts = Counter(each.client for number in range(300) for each in patient.of(number))
    assert len(counts) == 12 and max(counts.values()) > 3 * min(counts.values())
    assert max(each.age for number in range(300) for each in patient.of(number)) > 4
    assert len({each.client for number in range(300) for each in strict.of(number)}) < 12
