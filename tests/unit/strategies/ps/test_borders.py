"""A hold finds every worker, wherever it waits; else the held and those that wait for them wait for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.coordinator.holding import next_hold
from shoal.ps.consistency import parse_sync
from shoal.ps.dealing import SlotHolder
from shoal.ps.messages import View
from shoal.ps.worker import WorkerMachine
from shoal.spec import ParameterServer, World
from shoal.strategies.ps.borders import Borders
from shoal.strategies.ps.client import PsClient
from shoal.strategies.ps.turns import Turns

HOLD = 1
STEPS = 60


class WaitingClient(PsClient):
    """A client that hears nothing but the view that tells of a hold; `idle` is called while it waits, once."""

    def __init__(self, spec: ParameterServer) -> None:
        self.machine = WorkerMachine(node=1, rank=0, num_shards=1, consistency=parse_sync(spec.sync), now=0.0)
        self.served = cast(Any, SimpleNamespace(spec=spec, consistency=parse_sync(spec.sync)))
        self.scale = cast(Any, SimpleNamespace(catch_up=lambda: None))
        self.puller = cast(Any, SimpleNamespace(begin=lambda clock: None))
        self.beginning = None
        self.idle: Callable[[], None] = lambda: None

    def tell_hold(self) -> None:
        settings = {"hold": [HOLD, None]}
        view = View(term=1, number=1, shards=[], addresses={}, workers={0: 1, 1: 2}, settings=settings)
        self.machine.on_message(0, view, 0.0)

    def come_after_the_last_step(self) -> None:
        deal = {"slots": [[1, 0], [2, 0]], "recalled": []}
        self.machine.slots = SlotHolder(1)
        self.machine.slots.on_view(
            View(term=1, number=1, shards=[], addresses={}, workers={0: 1, 1: 2}, settings={"deal": deal})
        )
        self.machine.links[0].clocks, self.machine.links[0].rounds = {0: STEPS, 1: STEPS}, STEPS

    def join(self) -> int:
        return 1

    def wait(self, is_done: Callable[[], bool]) -> None:
        is_done()
        self.idle()


def make_borders() -> tuple[Borders, WaitingClient]:
    spec = ParameterServer(sync="alternate:4", servers=1)
    client = WaitingClient(spec)
    borders = Borders(client, spec, World(world_size=2), slots=2)
    client.idle = borders.speak
    return borders, client


@pytest.mark.parametrize("clock", [5, 25])
def test_who_waits_for_a_round_says_that_it_is_past_that_clock(clock: int) -> None:
    _, waiting = make_borders()
    waiting.tell_hold()
    assert waiting.is_held
    waiting.await_round(clock)
    assert waiting.machine.facts["held"] == [HOLD, clock]

    held = {"held": [HOLD, clock - 1]}
    agreed = next_hold([HOLD, None], waiting.machine.facts, [held], None)
    assert agreed == [HOLD, clock], "so the worker that is held takes the step that the other waits for"


def test_who_waits_for_its_turn_says_that_it_has_not_begun() -> None:
    _, waiting = make_borders()
    waiting.tell_hold()
    waiting.begin(7)
    assert waiting.machine.facts["held"] == [HOLD, 6]


def test_between_two_waits_a_worker_says_nothing() -> None:
    borders, client = make_borders()
    client.begin(5)
    client.await_round(5)
    assert not client.is_held
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
        self.is_redealt = False
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
    spec, world = ParameterServer(sync="alternate:4"), World(world_size=2)
    client.come_after_the_last_step()
    turns = Turns(client, spec, world, first, slots=2, steps=STEPS, begun_at=0)
    assert list(turns) == []
    client.tell_hold()
    first.speak()
    assert client.machine.facts["held"] == [HOLD, STEPS]
