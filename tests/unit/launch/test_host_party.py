"""Hosts together: each process is reached at its own, and a host that fails is lost alone."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from shoal.comm.words import Stop
from shoal.errors import LaunchError
from shoal.launch.messages import HostFailed, HostLost, Load, News, Sight, Started
from shoal.launch.party import HostParty
from shoal.spec import World
from shoal.spec.host_facts import HostFacts
from shoal.spec.told import Told


@dataclass
class FakeHost:
    """Notes what it is asked for."""

    facts: HostFacts = field(default_factory=HostFacts)
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    news: list[News] = field(default_factory=list)
    failure: str = ""

    def __post_init__(self) -> None:
        self._fd = os.eventfd(0)

    def fileno(self) -> int:
        return self._fd

    def start(self, process: int, world: World) -> None:
        if self.failure:
            raise LaunchError(self.failure)
        self.asked.append(("start", process))

    def collect(self) -> list[News]:
        if self.failure:
            raise LaunchError(self.failure)
        news, self.news = self.news, []
        return news

    def say(self, process: int, word: Told) -> None:
        self.asked.append(("say", process))

    def signal(self, process: int, signum: int) -> None:
        self.asked.append(("signal", process))

    def look_into(self, processes: Collection[int]) -> dict[int, Sight]:
        return {process: Sight(stacks=f"of {process}") for process in processes}

    def measure_load(self) -> Load:
        return Load(idle_cores=1.5, waiting=1.0)

    def close(self) -> None:
        self.asked.append(("close",))
        os.close(self._fd)


@pytest.fixture
def hosts() -> list[FakeHost]:
    return [FakeHost(), FakeHost()]


@pytest.fixture
def party(hosts: list[FakeHost]) -> Iterator[HostParty]:
    with selectors.DefaultSelector() as selector:
        party = HostParty(hosts, selector)
        for process in range(4):
            assert party.start(process, World(host_number=process % 2)) is None
        yield party
        party.close()


def test_each_process_is_reached_at_its_own_host(party: HostParty, hosts: list[FakeHost]) -> None:
    party.say(1, Stop())
    party.signal(2, signal.SIGTERM)
    assert hosts[0].asked == [("start", 0), ("start", 2), ("signal", 2)]
    assert hosts[1].asked == [("start", 1), ("start", 3), ("say", 1)]
    assert party.look_into([0, 1, 3]) == {number: Sight(stacks=f"of {number}") for number in (0, 1, 3)}
    assert party.measure_load() == Load(idle_cores=3.0, waiting=2.0)


def test_a_host_that_fails_is_lost_once_and_left_alone(party: HostParty, hosts: list[FakeHost]) -> None:
    hosts[0].news, hosts[1].failure = [Started(0)], "It burns."
    assert list(party.collect()) == [Started(0), HostLost(1, "It burns.")]
    assert hosts[1].asked[-1] == ("close",)
    party.say(1, Stop())
    party.signal(3, signal.SIGTERM)
    assert party.start(5, World(host_number=1)) is None, "its loss was told"
    assert list(party.collect()) == [] and party.look_into([1, 2]) == {2: Sight(stacks="of 2")}
    assert hosts[1].asked[-1] == ("close",)


def test_a_process_that_cannot_be_started_costs_its_host(party: HostParty, hosts: list[FakeHost]) -> None:
    hosts[0].failure = "No zygote."
    assert party.start(4, World(host_number=0)) == HostLost(0, "No zygote.")
    assert party.next_deadline() is not None


def test_the_only_host_takes_the_run_with_it() -> None:
    with selectors.DefaultSelector() as selector:
        alone = FakeHost(failure="It burns.")
        party = HostParty([alone], selector)
        assert list(party.collect()) == [HostFailed("It burns.")]
        assert party.next_deadline() is None, "what happens wakes its supervisor"
        party.close()
