"""All workers come to one border: when it is decided, and who lifts it."""

from __future__ import annotations

from shoal.coordinator.holding import next_hold
from shoal.coordinator.leases import Leases


def test_nothing_holds_until_the_first_worker_asks() -> None:
    assert next_hold(None, {}, [{}], None) is None
    assert next_hold(None, {"hold": "soon"}, [{}], None) is None
    assert next_hold(None, {"hold": 1}, [{}], None) == [1, None]


def test_leased_cells_have_their_border_at_once() -> None:
    assert next_hold(None, {"hold": 1}, [{}], 6) == [1, 6]


def test_the_border_is_where_the_furthest_is_once_all_have_said_how_far_they_are() -> None:
    first = {"hold": 2, "held": [2, 7]}
    assert next_hold([2, None], first, [{}, {"held": [2, 9]}], None) == [2, None]
    assert next_hold([2, None], first, [{"held": [1, 8]}, {"held": [2, 9]}], None) == [2, None], "of an older hold"
    assert next_hold([2, None], first, [{"held": [2, 8]}, {"held": [2, 9]}], None) == [2, 9]


def test_what_was_released_stays_so_until_it_is_asked_for_again() -> None:
    assert next_hold([1, 9], {"hold": 1, "released": 1}, [], None) is None
    assert next_hold(None, {"hold": 1, "released": 1}, [], None) is None
    assert next_hold(None, {"hold": 2, "released": 1}, [], None) == [2, None]


def test_no_cell_beyond_the_limit_is_handed_out_but_those_that_came_back_are() -> None:
    leases = Leases(10)
    assert leases.ask(1, wanted=3, done=(), held=()) == [0, 1, 2]
    leases.limit = leases.border(2)
    assert leases.limit == 4, "the end of the step that cell 2 belongs to"
    leases.release(1)
    assert leases.ask(2, wanted=10, done=(), held=()) == [0, 1, 2, 3]
    leases.limit = None
    assert leases.ask(2, wanted=10, done=(), held=()) == list(range(10))


def test_the_border_is_never_beyond_the_last_cell() -> None:
    leases = Leases(5)
    leases.ask(1, wanted=5, done=(), held=())
    assert leases.border(2) == 5
