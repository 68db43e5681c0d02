"""A hold finds every worker, wherever it waits; else the held and those that wait for them wait for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from shoal.coordinator.holding import next_hold
from shoal.ps.consistency import parse_sync
from shoal.ps.messages import View
from shoal.ps.worker import WorkerMachine
from shoal.roles.borders import Borders
from shoal.spec import ParameterServer, World
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
    borders = Borders(cast(PsClient, client), spec, world, slots=2, save=lambda steps, waited_s: None)
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
