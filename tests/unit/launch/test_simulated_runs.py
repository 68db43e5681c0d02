"""Whole runs on a simulated clock: the supervisor's machine with its successions, the parameter server's machines,
and processes that start, stop, go on and end, on one host and on several. Every run ends as it must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from helpers.run_sim import RunFailed, Undone, simulate
from helpers.run_sim.faults import Kind
from shoal.comm.words import MemberLost, MembersLiving
from shoal.coordinator.machine import Coordinator
from shoal.launch.crew import Hand
from shoal.launch.moves import PlaceMoves
from shoal.launch.resizing import Resizing
from shoal.launch.service import Service, _identity
from shoal.launch.verdict import Failure

FEW = 100
"""Seeds in every run of the tests."""
MANY, AT_ONCE = 10_000, 1_000
STORMS = 10


def test_a_hundred_runs_end_as_they_must() -> None:
    struck: Counter[str] = Counter()
    for seed in range(FEW):
        struck += simulate(seed)
    kinds = set(Kind) - {Kind.LOSE_HOST}  # these runs share one machine's memory
    assert set(struck) == {kind.value for kind in kinds}, f"Not every fault has struck: {struck}"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, MANY, AT_ONCE))
def test_thousands_of_runs_end_as_they_must(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        simulate(seed)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_runs_in_which_faults_come_in_numbers() -> None:
    for seed in range(AT_ONCE):
        simulate(seed, most_faults=15)


def test_storms_while_places_change_hands() -> None:
    for seed in range(STORMS):
        struck = simulate(seed, storm=True)
        assert {Kind.SCALE.value, Kind.KILL.value} <= set(struck)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many_storms_while_places_change_hands() -> None:
    for seed in range(STORMS, AT_ONCE):
        simulate(seed, storm=True)


def test_runs_over_hosts_of_which_some_are_lost() -> None:
    struck = sum((simulate(seed, spread=True) for seed in range(FEW)), Counter[str]())
    assert struck[Kind.LOSE_HOST.value] > FEW // 2


def test_a_seed_is_a_run() -> None:
    def recorded(seed: int) -> str:
        with pytest.raises(RunFailed) as raised:
            simulate(seed, undone=Undone.LOCK)
        return str(raised.value)

    seed = first_found(undone=Undone.LOCK)
    assert recorded(seed) == recorded(seed)


def first_found(**how: Any) -> int:
    """The first of the hundred seeds whose run does not end as it must."""
    for seed in range(FEW):
        try:
            simulate(seed, **how)
        except RunFailed:
            return seed
    raise AssertionError(f"{FEW} seeds did not find it.")


# What was mended is found again when it is undone.


def test_it_is_found_when_ends_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that ended well were not told of, and a successor had a list from the moment of its fork."""
    succeed: Callable[[Service, Failure], None] = Service._succeed_coordinator

    def tell_losses_only(self: Service, hand: Hand) -> None:
        if not (hand.is_worker and hand.is_done):
            self._bridge.say(self._coordinator, MemberLost(**_identity(hand)))

    def succeed_with_a_list(self: Service, failure: Failure) -> None:
        succeed(self, failure)
        members = [_identity(one) for one in self._members()]
        self._bridge.say(self._coordinator, MembersLiving(members=members, left=[]))

    monkeypatch.setattr(Service, "_tell_end", tell_losses_only)
    monkeypatch.setattr(Service, "_brief", lambda self, coordinator: None)
    monkeypatch.setattr(Service, "_succeed_coordinator", succeed_with_a_list)
    first_found()


def test_it_is_found_when_who_never_joined_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    on_lost: Callable[[Coordinator, int, float], None] = Coordinator.on_lost
    monkeypatch.setattr(Coordinator, "on_lost", lambda self, node, now, seat=None: on_lost(self, node, now))
    first_found()


def test_it_is_found_when_a_run_folder_is_not_locked() -> None:
    first_found(undone=Undone.LOCK)


def test_it_is_found_when_places_pass_on_before_they_were_released(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_back = PlaceMoves.ask_back

    def give_at_once(self: PlaceMoves, hand: Hand, places: Any) -> None:
        ask_back(self, hand, places)
        for other in self.hosts():
            if other is not hand:
                self.give(other, list(places)[:1])
                return

    monkeypatch.setattr(PlaceMoves, "ask_back", give_at_once)
    first_found()


def test_it_is_found_when_a_place_waits_for_one_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host died before it released it, and it was still meant for the newcomer long after."""

    def forget_what_it_releases(self: Resizing, hand: Hand) -> None:
        self._releasing = {place: one for place, one in self._releasing.items() if one is not hand}

    monkeypatch.setattr(Resizing, "forget", forget_what_it_releases)
    with pytest.raises(RunFailed, match="ended with exit code 0 before its work was done"):
        simulate(81, storm=True)
