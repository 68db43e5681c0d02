"""What a worker tells: not at every step, but nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.comm.channel import Channel
from shoal.observe.happenings import ScalarsLogged, TextLogged
from shoal.roles.process.reporter import Reporter
from shoal.roles.training.hosting import MoveOrder, PlacesMoved
from shoal.spec import World
from shoal.spec.vocabulary import State
from shoal.strategies.base import StepResult


class Desk:
    """A reporter under a clock that the test moves, and the supervisor's end of its channel."""

    def __init__(self, world: World) -> None:
        self.now = 100.0
        self.theirs, ours = Channel.pair()
        self.reporter = Reporter(world, ours, lambda: self.now)
        self.reporter.total_steps = 50

    def take_step(self, step: int, seconds: float) -> None:
        self.now += seconds
        self.reporter.on_step(step, StepResult(1 / step, 8.0, False), 8 * step, 0.1, 0)

    def heard(self) -> list[dict[str, Any]]:
        messages = []
        while (message := self.theirs.poll()) is not None:
            messages.append(message)
        return messages


@pytest.fixture
def desk() -> Desk:
    return Desk(World())


def test_steps_are_told_ten_times_a_second_and_none_is_lost(desk: Desk) -> None:
    for step in range(1, 51):
        desk.take_step(step, 0.015)
    desk.reporter.flush()
    messages = desk.heard()
    assert 7 <= len(messages) <= 12
    steps = [tuple(pair) for message in messages for pair in message["steps"]]
    assert steps == [(step, 1 / step) for step in range(1, 51)]
    assert messages[0]["steps"] == [[1, 1.0]], "the first step is told at once"
    last = messages[-1]
    assert (last["samples"], last["epoch"], last["lr"], last["total_steps"]) == (400, 1, 0.1, 50)
    desk.reporter.flush()
    assert not desk.heard()


def test_steps_that_are_known_at_once_are_told_at_once(desk: Desk) -> None:
    for first in (1, 5):
        desk.now += 1.0
        for step in range(first, first + 4):
            desk.reporter.on_step(step, StepResult(1.0, 8.0, False), 8 * step, 0.1, 0, more=step < first + 3)
    told = [[step for step, _ in message["steps"]] for message in desk.heard()]
    assert told == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_what_was_done_is_told_before_another_state_is_entered(desk: Desk) -> None:
    desk.take_step(3, 0.01)
    desk.reporter.on_state(State.EVALUATING, 3)
    steps, state = desk.heard()
    assert steps["steps"] == [[3, 1 / 3]] and state["state"] == "evaluating"


def test_what_losses_are_told_with_goes_along(desk: Desk) -> None:
    for step in range(1, 4):
        desk.reporter.on_step(step, StepResult(1.0, 8.0, False, parts={"ce": step / 2}), 8, 0.1, 0)
    desk.reporter.flush()
    desk.take_step(4, 1.0)
    first, second, third = desk.heard()
    assert first["parts"] == [[1, {"ce": 0.5}]] and second["parts"] == [[2, {"ce": 1.0}], [3, {"ce": 1.5}]]
    assert third.get("parts") is None


def test_only_the_first_worker_speaks_about_the_loss() -> None:
    desk = Desk(World(global_rank=1, world_size=2))
    desk.take_step(1, 1.0)
    desk.reporter.on_evaluation(1, {"loss": 1.0})
    desk.reporter.flush()
    assert not desk.heard()
    assert desk.reporter.step == 1


def test_steps_come_before_the_evaluation_that_follows_them(desk: Desk) -> None:
    desk.take_step(1, 0.0)
    desk.take_step(2, 0.01)
    desk.reporter.on_evaluation(2, {"loss": 0.5})
    assert [message["kind"] for message in desk.heard()] == ["steps", "steps", "evaluation"]


def test_what_is_logged_comes_with_the_steps_and_after_them(desk: Desk) -> None:
    desk.take_step(1, 0.0)
    for told in (_norm(2, 0.5), _norm(3, 0.25), TextLogged(name="note", text="hello", step=3), _norm(4, 0.125)):
        desk.reporter.log(told)
    desk.take_step(2, 0.01)
    assert [message["kind"] for message in desk.heard()] == ["steps"], "not at every step"
    desk.reporter.flush()
    desk.reporter.flush()
    _, first, text, second = desk.heard()
    assert first == {"kind": "scalars", "scalars": [[2, "norm", 0.5], [3, "norm", 0.25]]}, "many at once"
    assert text["text"] == "hello" and second["scalars"] == [[4, "norm", 0.125]], "in their order"


def _norm(step: int, value: float) -> ScalarsLogged:
    return ScalarsLogged(scalars=[[step, "norm", value]])


def test_progress_is_told_now_and_then_and_at_the_end(desk: Desk) -> None:
    for step in range(1, 51):
        desk.now += 0.03
        desk.reporter.on_progress(step, 4 * step)
    told = [message["step"] for message in desk.heard()]
    assert 10 <= len(told) <= 17 and told[-1] == 50


def test_a_stop_is_heard_and_stays(desk: Desk) -> None:
    assert not desk.reporter.wants_stop()
    desk.theirs.send({"kind": "stop"})
    assert not desk.reporter.wants_stop(), "it does not ask at every step"
    desk.now += 1.0
    assert desk.reporter.wants_stop()
    assert desk.reporter.wants_stop()


def test_a_spare_prepares_and_waits_for_places_or_the_end() -> None:
    spare = World(role="spare", global_rank=0, world_size=3)
    desk = Desk(spare)

    def prepare() -> None:
        desk.theirs.send({"kind": "hello"})
        desk.theirs.send({"kind": "takeover", "places": [2, 1], "generation": 4})

    world = desk.reporter.wait_for_places(spare, prepare)
    assert (world.role, world.global_rank, world.places, world.generation) == ("worker", 1, (1, 2), 4)
    desk.reporter.confirm_places(world)
    assert desk.heard() == [
        {"kind": "state", "state": "ready", "step": 0},
        {"kind": "adopted", "places": [1, 2], "generation": 4},
    ]
    desk.theirs.send({"kind": "stop"})
    with pytest.raises(SystemExit) as leave:
        desk.reporter.wait_for_places(spare, prepare)
    assert leave.value.code == 0


def test_a_spare_that_is_called_at_birth_prepares_nothing() -> None:
    spare = World(role="spare", global_rank=0, world_size=3)
    desk = Desk(spare)
    desk.theirs.send({"kind": "takeover", "places": [0], "generation": 1})
    assert desk.reporter.wait_for_places(spare, lambda: pytest.fail("others wait")).is_first


def test_places_come_at_once_and_leave_between_steps() -> None:
    desk = Desk(World(global_rank=1, world_size=3))
    desk.reporter.on_idle()
    desk.theirs.send({"kind": "release", "places": [1], "generation": 1})
    desk.reporter.on_idle()
    assert not list(desk.reporter.take_orders(at_border=False))
    desk.theirs.send({"kind": "adopt", "places": [0], "generation": 2})
    with pytest.raises(PlacesMoved):
        desk.reporter.on_idle()
    (adopt,) = desk.reporter.take_orders(at_border=False)
    more = adopt.applied_to(World(global_rank=1, world_size=3))
    assert more is not None and more.places == (0, 1) and more.is_first and more.generation == 2
    desk.reporter.on_idle()
    (release,) = desk.reporter.take_orders(at_border=True)
    less = release.applied_to(more)
    assert less is not None and less.places == (0,)
    assert release.applied_to(World(global_rank=1, world_size=3)) is None, "nothing is left to do"
    desk.reporter.on_moved(release, less)
    assert desk.heard() == [{"kind": "released", "places": [1], "generation": 1}]


def test_whoever_adopts_the_first_place_speaks_for_all() -> None:
    desk = Desk(World(global_rank=1, world_size=2))
    desk.take_step(1, 1.0)
    order = MoveOrder(kind="adopt", places=(0,), generation=1)
    desk.reporter.on_moved(order, World(global_rank=1, world_size=2).hosting((0, 1), 1))
    desk.take_step(2, 1.0)
    assert [message["kind"] for message in desk.heard()] == ["adopted", "steps"]


def test_the_end_is_told_last(desk: Desk) -> None:
    desk.reporter.line("a word")
    desk.reporter.done({"loss": 0.5})
    kinds = [(message["kind"], message.get("state")) for message in desk.heard()]
    assert kinds == [("line", None), ("state", "done"), ("done", None)]
