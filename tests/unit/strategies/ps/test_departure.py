"""When a worker of a served run heeds the wish that it end."""

from __future__ import annotations

from shoal.strategies.ps.departure import Departure


class Hours:
    now = 0.0


def leaving(*, in_lockstep: bool, is_first: bool) -> tuple[Departure, Hours]:
    hours = Hours()
    words = {"in_lockstep": in_lockstep, "is_first": is_first}
    return Departure(**words, wants_stop=lambda: True, clock=lambda: hours.now), hours


def test_who_follows_nobody_leaves_at_once():
    departure, _ = leaving(in_lockstep=False, is_first=False)
    departure.is_in_step = True
    assert departure.is_due_at_border() and departure.is_due_while_waiting()


def test_in_lockstep_the_first_decides_and_ends_its_step():
    departure, hours = leaving(in_lockstep=True, is_first=True)
    assert departure.is_due_at_border() and departure.is_due_while_waiting(), "before its step it may leave"
    departure.is_in_step = True
    assert not departure.is_due_while_waiting()
    hours.now = 4.0
    assert not departure.is_due_while_waiting(), "the others have a part in its step"
    hours.now = 6.0
    assert departure.is_due_while_waiting(), "they are gone"


def test_the_others_leave_when_no_step_comes():
    departure, hours = leaving(in_lockstep=True, is_first=False)
    assert not departure.is_due_at_border() and not departure.is_due_while_waiting()
    hours.now = 0.6
    assert departure.is_due_while_waiting()


def meeting(*, is_first: bool, is_at_rest: bool = False, is_used_up: bool = False) -> tuple[Departure, Hours]:
    hours = Hours()
    words = {"in_lockstep": False, "saves": True, "is_first": is_first, "wants_stop": lambda: True}
    ways = {"is_at_rest": lambda: is_at_rest, "is_used_up": lambda: is_used_up, "clock": lambda: hours.now}
    return Departure(**words, **ways), hours


def test_where_the_run_is_saved_the_first_calls_all_and_does_not_leave_before():
    departure, hours = meeting(is_first=True, is_at_rest=True)
    assert departure.calls_all() and not departure.is_due_at_border() and not departure.is_due_while_waiting()
    departure, hours = meeting(is_first=True, is_at_rest=True, is_used_up=True)
    assert not departure.calls_all(), "the others have the last of the data, and must not be held"
    assert not departure.is_due_while_waiting()
    hours.now = 100.0
    assert departure.is_due_while_waiting(), "they did not come"


def test_where_the_run_is_saved_the_others_leave_when_nothing_is_left_before_the_border():
    for is_at_rest in (False, True):
        departure, _ = meeting(is_first=False, is_at_rest=is_at_rest)
        assert not departure.calls_all() and not departure.is_due_at_border()
        assert departure.is_due_while_waiting() is is_at_rest


def test_who_has_learnt_enough_calls_all_though_nobody_asked():
    departure = Departure(in_lockstep=False, saves=True, is_first=True, wants_stop=lambda: False)
    assert not departure.calls_all()
    departure.enough = "the loss no longer gets better"
    assert departure.calls_all() and not departure.is_due_while_waiting()


def test_nobody_leaves_unasked():
    departure = Departure(in_lockstep=False, is_first=True, wants_stop=lambda: False)
    assert not departure.is_due_at_border() and not departure.is_due_while_waiting()
