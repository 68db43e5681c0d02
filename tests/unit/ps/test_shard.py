"""The shard: which pushes become updates, in which order, and that its books are all of it."""

from __future__ import annotations

import pytest

from helpers.ps_pushes import Recorder, make_push, make_shard
from shoal.ps.messages import Control, Push, PushOutcome
from shoal.ps.shard import PushVerdict, Shard


def control(number: int, action: str, **values: object) -> Control:
    return Control(shard=0, term=1, number=number, action=action, values=values)


def calls(shard: Shard) -> list:
    assert isinstance(shard.values, Recorder)
    return shard.values.calls


def test_asynchronous_pushes_are_updates_of_their_own():
    shard = make_shard("asp")
    assert [shard.accept(make_push(cell)) for cell in (1, 0, 3)] == [PushOutcome.APPLIED] * 3
    # Half of the batch moves the model by half a step.
    how = {"scale": 1.0, "lr_scale": 0.5, "loss": 2.0}
    assert calls(shard) == [
        ([[1]], how | {"last": False}),
        ([[0]], how | {"last": True}),
        ([[3]], how | {"last": False}),
    ]
    assert (shard.version, shard.floor, shard.clocks, len(shard.cells)) == (3, 1, {0: 1, 1: 2}, 3)


def test_a_round_is_one_update_in_the_order_of_slots():
    shard = make_shard("bsp", slots=3)
    for cell in (2, 0):
        assert shard.accept(make_push(cell, slots=3)) is PushOutcome.APPLIED
    assert (shard.version, shard.rounds, len(shard.cells)) == (0, 0, 0)
    shard.accept(make_push(1, slots=3))
    assert calls(shard) == [([[0], [1], [2]], {"scale": 1.0, "lr_scale": 1.0, "loss": 2.0, "last": True})]
    assert (shard.version, shard.rounds, len(shard.cells)) == (1, 1, 3)


def test_merged_pushes_fill_several_slots():
    shard = make_shard("bsp", slots=3)
    shard.accept(make_push(2, slots=3))
    shard.accept(make_push(0, 1, slots=3))
    assert [cells for cells, _ in calls(shard)] == [[[0, 1], [2]]]


def test_sums_are_divided_by_what_their_samples_count():
    shard = make_shard("bsp")
    shard.accept(make_push(0, weight=3.0, loss=6.0, scaled=False))
    shard.accept(make_push(1, weight=5.0, loss=2.0, scaled=False))
    assert calls(shard)[0][1] == {"scale": 1 / 8, "lr_scale": 1.0, "loss": 1.0, "last": True}


def test_a_round_of_no_weight_moves_nothing():
    shard = make_shard("asp")
    shard.accept(make_push(0, weight=0.0, loss=0.0, scaled=False))
    assert calls(shard)[0][1]["scale"] == 0.0


@pytest.mark.parametrize(("sync", "shares"), [("asp", [0.5, 0.5]), ("bsp", [1.0])])
def test_parameters_are_averaged(sync, shares):
    shard = make_shard(sync, average=True)
    shard.accept(make_push(0))
    shard.accept(make_push(1))
    assert [how for _, how in calls(shard)] == [{"share": share} for share in shares]


def test_several_steps_of_local_training_are_one_round():
    shard = make_shard("bsp", average=True, every=2)
    assert shard.judge(make_push(0, 2)) is PushVerdict.NEW
    assert shard.judge(make_push(0, 4)) is PushVerdict.MALFORMED
    shard.accept(make_push(0, 2))
    assert (shard.rounds, shard.version) == (0, 0)
    shard.accept(make_push(1, 3))
    assert (shard.rounds, shard.version, len(shard.cells)) == (1, 1, 4)
    # The last round may be shorter: the run ends in the middle of it.
    shard.accept(make_push(4, clock=2, sequence=2))
    shard.accept(make_push(5, clock=2, sequence=2))
    assert (shard.rounds, shard.version) == (2, 2)


def test_asynchronous_local_training_counts_as_one_of_all_workers():
    shard = make_shard("asp", average=True, every=4)
    shard.accept(make_push(0, 2, 4, 6))
    assert calls(shard) == [([[0, 2, 4, 6]], {"share": 0.5})]


def test_a_push_is_known_by_its_number_and_by_its_data():
    shard = make_shard("asp")
    push = make_push(0)
    assert shard.judge(push) is PushVerdict.NEW
    shard.accept(push)
    assert shard.judge(push) is PushVerdict.KNOWN
    assert shard.outcome_of_known(push) is PushOutcome.DUPLICATE
    by_another = make_push(0, origin=77)
    assert shard.judge(by_another) is PushVerdict.NEW
    assert shard.accept(by_another) is PushOutcome.DUPLICATE
    assert shard.judge(by_another) is PushVerdict.KNOWN
    assert shard.version == 1


def test_what_is_partly_in_cannot_be_taken():
    shard = make_shard("asp")
    shard.accept(make_push(0))
    assert shard.accept(make_push(0, 1, origin=77)) is PushOutcome.OVERLAP
    assert (shard.version, shard.clocks) == (1, {0: 1, 1: 0})
    assert shard.accept(make_push(1, origin=77, sequence=2)) is PushOutcome.APPLIED


def test_a_gap_in_a_nodes_pushes_is_waited_for():
    shard = make_shard("asp")
    assert shard.judge(make_push(2)) is PushVerdict.EARLY
    shard.accept(make_push(0))
    assert shard.judge(make_push(2)) is PushVerdict.NEW


def test_nobody_is_a_round_ahead():
    shard = make_shard("bsp")
    shard.accept(make_push(0))
    assert shard.judge(make_push(2)) is PushVerdict.EARLY
    shard.accept(make_push(1))
    assert shard.judge(make_push(2)) is PushVerdict.NEW


@pytest.mark.parametrize(
    "push",
    [
        make_push(0, clock=2),
        make_push(0, 2),
        make_push(-1, sequence=1, clock=1),
        make_push(0, frames=()),
        make_push(0, frames=(b"",)),
    ],
    ids=["another step's cells", "cells of two steps", "no such cell", "no bulk", "bulk too small"],
)
def test_what_no_honest_worker_sends_is_refused(push: Push):
    assert make_shard("bsp").judge(push) is PushVerdict.MALFORMED


def test_quorum_drops_the_late_and_says_so():
    shard = make_shard("quorum:1/2")
    assert shard.accept(make_push(1)) is PushOutcome.APPLIED
    late = make_push(0)
    assert shard.accept(late) is PushOutcome.LATE
    assert shard.outcome_of_known(late) is PushOutcome.LATE
    assert (shard.version, shard.rounds, dict(shard.tally)) == (1, 1, {"applied": 1, "late": 1, "cells": 1})
    assert shard.clocks == {0: 1, 1: 1}


def test_alternate_gathers_only_its_synchronous_steps():
    shard = make_shard("alternate:1")
    for cell in range(4):
        shard.accept(make_push(cell))
    assert [cells for cells, _ in calls(shard)] == [[[0]], [[1]], [[2], [3]]]
    assert [how["last"] for _, how in calls(shard)] == [False, True, True]
    assert shard.rounds == 2


def test_delay_counts_the_updates_in_between():
    shard = make_shard("asp")
    for cell in (0, 1, 2):
        shard.accept(make_push(cell, based_on=0))
    assert (shard.delay_mean, shard.delay_max) == (1.0, 2)
    # A version that was lost with its primary is ahead of the shard: that is no delay.
    shard.accept(make_push(3, based_on=99))
    assert shard.delay_max == 2


def test_damping_makes_late_gradients_count_less():
    shard = make_shard("asp", damped=True)
    for cell in (0, 1, 2):
        shard.accept(make_push(cell, based_on=0))
    assert [how["lr_scale"] for _, how in calls(shard)] == [0.5, 0.5 / (1 + 1 / 2), 0.5 / (1 + 2 / 2)]


def test_controls_act_at_their_place_in_the_log():
    shard = make_shard("asp")
    shard.accept(control(1, "mark"))
    before = shard.values.digest()
    shard.accept(control(2, "scale", factor=0.5))
    shard.accept(make_push(0))
    assert calls(shard)[0][1]["lr_scale"] == 0.5 * 0.5
    shard.accept(control(3, "rollback"))
    assert (shard.values.digest(), shard.version, shard.control) == (before, 2, 3)
    assert shard.accept(make_push(0, origin=77)) is PushOutcome.DUPLICATE


def test_rolling_back_to_nothing_changes_nothing():
    shard = make_shard("asp")
    shard.accept(control(1, "rollback"))
    assert (shard.version, shard.index) == (0, 1)


def test_a_new_member_holds_nobody_back():
    shard = make_shard("ssp:1")
    for cell in range(6):
        shard.accept(make_push(cell))
    shard.accept(control(1, "members", ranks=[1, 2]))
    assert (shard.floor, shard.clocks[2]) == (3, 3)
    shard.accept(make_push(7))
    assert shard.floor == 3


@pytest.mark.parametrize("sync", ["asp", "bsp", "quorum:2/3", "alternate:1"])
def test_books_are_all_of_it(sync):
    shard = make_shard(sync, slots=3)
    log = [make_push(cell, slots=3) for cell in range(8)]
    for push in log[:4]:
        shard.accept(push)
    shard.accept(control(1, "scale", factor=0.25))
    shard.accept(control(2, "mark"))
    frames, books = shard.books(bulk=shard.values.frames())
    values = Recorder(0)
    values.load(frames[: books["bulk"]], books["facts"])
    copy = Shard.from_books(shard.rules, values, frames, books)
    assert (copy.books(), copy.open_round) == (shard.books(), shard.open_round)
    for entry in [*log[4:], control(3, "rollback"), log[4]]:
        assert copy.accept(entry) is shard.accept(entry)
    assert copy.books() == shard.books()
    assert copy.values.digest() == shard.values.digest()


def test_a_run_that_goes_on_knows_what_was_done():
    shard = make_shard("bsp", start=5)
    assert (shard.rounds, shard.floor, len(shard.cells)) == (5, 5, 10)
    assert shard.judge(make_push(10, sequence=1)) is PushVerdict.NEW
    assert shard.accept(make_push(3)) is PushOutcome.DUPLICATE


def test_what_losses_are_told_with_is_averaged_over_a_round():
    shard = make_shard("bsp")
    shard.accept(make_push(0, weight=1.0, loss_parts=[2.0, 8.0]))
    shard.accept(make_push(1, weight=3.0, loss_parts=[6.0, 0.0]))
    assert shard.loss_parts == [2.0, 2.0]
    frames, books = shard.books()
    assert Shard.from_books(shard.rules, Recorder(0), frames, books).loss_parts == [2.0, 2.0]
    shard.accept(make_push(2, weight=2.0, loss_parts=[4.0, 6.0]))
    shard.accept(make_push(3, weight=0.0, loss=0.0))
    assert shard.loss_parts == [2.0, 3.0], "padding alone has none, and counts nothing"
    shard.accept(make_push(4, loss_parts=[4.0, 6.0]))
    shard.accept(make_push(5))
    assert shard.loss_parts == [], "one did not tell them"
