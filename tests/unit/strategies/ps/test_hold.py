"""Holds of a first worker and of its successor: what others said of one does not count for the other."""

from __future__ import annotations

from shoal.coordinator.holding import next_hold
from shoal.ps.consistency import parse_sync
from shoal.ps.messages import View
from shoal.ps.worker import WorkerMachine
from shoal.strategies.ps.holding import Hold


def first_worker(generation: int) -> tuple[Hold, WorkerMachine]:
    machine = WorkerMachine(node=1, rank=0, num_shards=1, consistency=parse_sync("ssp:2"), now=0.0)
    return Hold(machine, lambda is_done: None, generation), machine


def view(number: int, **settings: object) -> View:
    return View(term=1, number=number, shards=[], addresses={}, workers={}, settings=settings)


def test_asking_twice_is_asking_once() -> None:
    hold, machine = first_worker(0)
    hold.ask()
    hold.ask()
    assert machine.facts["hold"] == 1


def test_a_planned_hold_is_not_one_that_was_asked_for() -> None:
    hold, machine = first_worker(0)
    machine.view = view(1, hold=[3, 400])
    assert not hold.is_asked_for
    hold.ask()
    assert machine.facts["hold"] == 4
    machine.view = view(2, hold=[4, 36])
    assert hold.is_asked_for


def test_a_successor_does_not_take_old_answers_for_new_ones() -> None:
    hold, machine = first_worker(0)
    hold.ask()
    old_answer = {"held": [machine.facts["hold"], 10]}
    hold, machine = first_worker(1)
    hold.ask()
    asked = next_hold(None, machine.facts, [old_answer], None)
    assert asked is not None
    facts = {**machine.facts, "held": [asked[0], 48]}
    assert next_hold(asked, facts, [old_answer], None) == asked, "the other worker may be far beyond clock 10"
    assert next_hold(asked, facts, [{"held": [asked[0], 50]}], None) == [asked[0], 50]


def test_a_successor_is_as_far_as_any_shard_has_its_predecessor() -> None:
    """That one died before all shards had its last push: a border before it would hold half of it."""
    machine = WorkerMachine(node=1, rank=1, num_shards=2, consistency=parse_sync("ssp:2"), now=0.0)
    hold = Hold(machine, lambda is_done: None, 1)
    settings = {"hold": [7, None]}
    machine.on_message(0, View(term=1, number=1, shards=[], addresses={}, workers={}, settings=settings), 0.0)
    machine.links[0].clocks, machine.links[1].clocks = {1: 5}, {1: 4}
    assert not hold.may_begin(5)
    assert machine.facts["held"] == [7, 5]
