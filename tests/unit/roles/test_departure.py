"""When a worker of a served run heeds the wish that it end."""

from __future__ import annotations

from shoal.roles.departure import Departure


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


def test_nobody_leaves_unasked():
    departure = Departure(in_lockstep=False, is_first=True, wants_stop=lambda: False)
    assert not departure.is_due_at_border() and not departure.is_due_while_waiting()
