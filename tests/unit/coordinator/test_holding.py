"""All workers come to one border: when it is decided, and who lifts it."""

from __future__ import annotations

from shoal.coordinator.holding import DONE, next_hold
from shoal.coordinator.leases import Leases
from shoal.ledger.cells import CellSet


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


def test_no_border_is_before_a_worker_that_has_done_all_of_its_own(make_job) -> None:
    first = {"hold": 2, "held": [2, 7]}
    assert next_hold([2, None], first, [{"done": True}, {"held": [2, 9]}], None) == [2, DONE]
    job = make_job(leased=False, sync="ssp:3").formed()
    job.report(21, done=True)
    job.coordinator.on_left(21, 1, job.now)
    job.report(20, hold=1, held=[1, 7])
    job.report(20, hold=1, held=[1, 7])
    assert hold_of(job) == [1, DONE], "nobody can say any more where it is"


def test_what_was_released_stays_so_until_it_is_asked_for_again() -> None:
    assert next_hold([1, 9], {"hold": 1, "released": 1}, [], None) is None
    assert next_hold(None, {"hold": 1, "released": 1}, [], None) is None
    assert next_hold(None, {"hold": 2, "released": 1}, [], None) == [2, None]


def test_who_asks_before_a_planned_border_wants_to_save_and_leave() -> None:
    planned = [400, 800]
    assert next_hold([1, 400], {"hold": 2}, [{}], 36, planned) == [2, 36]
    assert next_hold([2, 36], {"hold": 2}, [{}], 36, planned) == [2, 36]
    assert next_hold([1, 400], {"hold": 2}, [{}], None, planned) == [1, 400], (
        "not before it is known how far all are"
    )


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


def hold_of(job) -> list | None:
    return job.view.settings.get("hold")


def all_speak(job, *, held: dict[int, tuple[int, ...]], cells: range) -> None:
    """Every member says under the newest view what a successor must know."""
    job.report_shards(cells)
    for node, own in held.items():
        job.report(node, **({"hold": 1} if node == 20 else {}))
        job.ask(node, wanted=len(own), held=own)


def test_a_successor_holds_nobody_before_it_knows_how_far_the_cells_are(make_job) -> None:
    job = make_job(num_cells=100, slots=2).formed()
    job.ask(20, wanted=40)
    job.ask(20, wanted=1, done=tuple(range(40)))
    after = job.successor()
    after.coordinator.on_tick(after.now)
    after.report(20, hold=1)
    assert hold_of(after) is None, "its leases begin at 0, and a border there would be below all that is done"
    all_speak(after, held={20: (40,), 21: ()}, cells=range(40))
    after.report(20, hold=1)
    assert hold_of(after) == [1, 42]


def test_a_successor_lets_go_what_its_predecessor_held_while_it_learns(make_job) -> None:
    job = make_job(num_cells=100, slots=2).formed()
    job.ask(20, wanted=5)
    job.report(20, hold=1)
    after = job.successor()
    after.coordinator.on_tick(after.now)
    assert hold_of(after) == [1, 6]
    after.report(20, hold=1, released=1)
    assert hold_of(after) is None


def test_the_border_of_a_successor_is_past_what_is_held_and_what_any_shard_has(make_job) -> None:
    held, pushed = make_job(num_cells=100, slots=2).formed(), make_job(num_cells=100, slots=2).formed()
    for job, own, cells in ((held, (61,), range(10)), (pushed, (), range(10))):
        after = job.successor()
        after.coordinator.on_tick(after.now)
        all_speak(after, held={20: (), 21: own}, cells=cells)
        if not own:  # Its worker died before the other shards had it.
            one = {"cells": CellSet([*cells, 61]).to_plain(), "tally": {}}
            after.report(10, shards={0: one})
        after.report(20, hold=1)
        assert hold_of(after) == [1, 62]
        given = after.ask(20, wanted=99).cells
        assert given == [cell for cell in range(10, 62) if cell not in own], "and nothing below it is forgotten"


def test_leases_go_on_after_what_was_handed_out_before() -> None:
    leases = Leases(20, settled=False)
    leases.ask(1, wanted=1, done=[9], held=[7])
    leases.settle(CellSet(range(5)))
    assert leases.border(4) == 12
    assert leases.ask(2, wanted=99, done=(), held=()) == [5, 6, 8, *range(10, 20)]


def test_planned_borders_hold_one_after_the_other_from_the_beginning(make_job) -> None:
    job = make_job(num_cells=13, slots=2, borders=range(4, 13, 4)).formed()
    assert hold_of(job) == [1, 4]
    assert job.ask(20, wanted=9).cells == [0, 1, 2, 3] and job.ask(21, wanted=1).dry
    job.report(20, released=1)
    assert hold_of(job) == [2, 8]
    assert job.ask(21, wanted=9).cells == [4, 5, 6, 7]
    after = job.successor()
    after.coordinator.on_tick(after.now)
    after.report(20, released=1)
    assert hold_of(after) == [2, 8], "it goes on where its predecessor was"
    after.report(20, released=2)
    after.report(20, released=3)
    assert hold_of(after) is None, "the last cells are the run's end"
