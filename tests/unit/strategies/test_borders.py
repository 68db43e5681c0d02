"""A hold finds every worker, wherever it waits; else the held and those that wait for them wait for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, cast

import pytest

from shoal.coordinator.holding import next_hold
from shoal.ps.consistency import parse_sync
from shoal.ps.messages import View
from shoal.ps.worker import WorkerMachine
from shoal.spec import ParameterServer, World
from shoal.strategies.ps.borders import Borders
from shoal.strategies.ps.client import PsClient

HOLD = 1


class WaitingClient:
    """A client that hears nothing but the view that tells of a hold; `idle` is called while it waits, once."""

    def __init__(self) -> None:
        self.machine = WorkerMachine(node=1, rank=0, num_shards=1, consistency=parse_sync("alternate:4"), now=0.0)
        self.idle: Callable[[], None] = lambda: None
        self.waited_for: list[int] = []

    def tell_hold(self) -> None:
        settings = {"hold": [HOLD, None]}
        view = View(term=1, number=1, shards=[], addresses={}, workers={0: 1, 1: 2}, settings=settings)
        self.machine.on_message(0, view, 0.0)

    def wait(self, is_done: Callable[[], bool]) -> None:
        raise AssertionError("nobody is released in these tests")

    def await_round(self, clock: int) -> None:
        self.waited_for.append(clock)
        self.idle()


def make_borders() -> tuple[Borders, WaitingClient]:
    client, spec = WaitingClient(), ParameterServer(sync="alternate:4", servers=1)
    world = World(world_size=2)
    borders = Borders(cast(PsClient, client), spec, world, slots=2)
    client.idle = borders.speak
    return borders, client


@pytest.mark.parametrize("clock", [5, 25])
def test_who_waits_for_a_round_says_that_it_is_past_that_clock(clock: int) -> None:
    first, waiting = make_borders()
    waiting.tell_hold()
    first.await_round(clock)
    assert waiting.waited_for == [clock]
    assert waiting.machine.facts["held"] == [HOLD, clock]

    held = {"held": [HOLD, clock - 1]}
    agreed = next_hold([HOLD, None], waiting.machine.facts, [held], None)
    assert agreed == [HOLD, clock], "so the worker that is held takes the step that the other waits for"


def test_between_two_waits_a_worker_says_nothing() -> None:
    borders, client = make_borders()
    borders.await_round(5)
    client.tell_hold()
    borders.speak()
    assert "held" not in client.machine.facts


class HeldClient:
    """Hears one view after the other; after each the worker is asked whether it is at rest."""

    def __init__(self, *holds: list[Any] | None) -> None:
        self.machine = WorkerMachine(node=2, rank=1, num_shards=1, consistency=parse_sync("ssp:2"), now=0.0)
        self._holds = deque(holds)
        self.borders = Borders(
            cast(PsClient, self),
            ParameterServer(sync="ssp:2"),
            World(global_rank=1, world_size=2),
            slots=2,
        )
        self.at_rest: list[bool] = []
        self.hear(0.0)

    def hear(self, seconds: float) -> None:
        hold = self._holds.popleft()
        settings = {} if hold is None else {"hold": hold}
        self.machine.view = View(term=1, number=1, shards=[], addresses={}, workers={}, settings=settings)
        self.at_rest.append(self.borders.is_at_rest)

    def wait(self, is_done: Any) -> None:
        raise AssertionError("only the first worker waits for others at a border")


def test_a_worker_that_has_still_to_come_to_the_border_is_not_at_rest() -> None:
    client = HeldClient([1, None], [1, 10])
    assert list(client.borders.heed(8)) == [], "only the first worker saves"
    assert client.at_rest == [False, False], (
        "it was held until it was known where the border is, and goes on to there"
    )


def test_a_worker_past_the_border_is_at_rest_until_all_go_on() -> None:
    client = HeldClient([1, None], [1, 10], [1, 10], None)
    assert list(client.borders.heed(11)) == []
    assert client.at_rest == [False, True, True, False]
    assert not client.borders.is_at_rest


def test_who_has_no_step_left_is_found_past_its_last_one() -> None:
    """The others are held before it, and it waits for them."""
    first, client = make_borders()
    first.end(61)
    client.tell_hold()
    first.speak()
    assert client.machine.facts["held"] == [HOLD, 60]
