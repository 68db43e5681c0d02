"""Another coordinator takes over, and a run comes to its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.coordinator import Coordinator, MemberOrder, Superseded
from shoal.ps.messages import Lease


def test_the_successor_tells_the_same_world_under_a_higher_term(job):
    after = job.successor()
    after.coordinator.on_tick(after.now)
    assert (after.view.term, after.view.number) == (2, job.view.number + 1)
    assert replace(after.view, term=1, number=job.view.number) == job.view
    assert all(after.told(node) == [after.view] for node in (10, 11, 20, 21))
    assert after.decisions("takeover")[0]["term"] == 2


def test_whoever_was_superseded_says_nothing_more(job):
    job.successor()
    job.lose(10)
    assert job.coordinator.superseded
    assert not job.coordinator.outbox and not job.coordinator.orders
    job.report(20, view=0)
    job.pass_time(1.0)
    job.coordinator.scale(workers=3, now=job.now)
    job.coordinator.on_living({}, job.now)
    assert not job.coordinator.outbox and not job.coordinator.orders


def test_of_two_that_take_over_at_once_one_is_refused(job):
    class Overtaken:
        def load(self):
            term, state = job.store.load()
            job.store.claim(term + 1)
            return term, state

        claim, save = job.store.claim, job.store.save

    with pytest.raises(Superseded, match="term 2"):
        Coordinator(job.plan, Overtaken(), 0.0)


def test_a_view_saved_after_the_successors_first_look_is_not_lost(job):
    class Delayed:
        """The predecessor manages to save once more between its successor's look and its claim."""

        def load(self):
            return job.store.load()

        def claim(self, term):
            job.lose(20)
            return job.store.claim(term)

        save = job.store.save

    after = Coordinator(job.plan, Delayed(), 0.0)
    after.on_tick(0.0)
    assert after.view.workers == {1: 21}


def test_members_that_died_meanwhile_are_lost_and_replaced(job):
    after = job.successor()
    after.living(11, 20)
    assert [shard.primary for shard in after.shards] == [11] * 4
    assert after.view.workers == {0: 20}
    starts = [("server", 0), ("worker", 1)]
    assert after.orders() == [MemberOrder(action="start", role=role, rank=rank) for role, rank in starts]


def test_who_asked_before_all_was_known_is_answered_when_it_is(job):
    """Nobody has to ask again, for which it would wait a while."""
    after = job.successor()
    after.coordinator.on_tick(after.now)
    for node in (20, 21):
        after.report(node)
        assert after.ask(node).cells == []
    after.coordinator.outbox.clear()
    after.report_shards(range(0))
    told = [message for to, message in after.coordinator.outbox if isinstance(message, Lease)]
    assert sorted(cell for lease in told for cell in lease.cells) == [0, 1]


def test_an_order_of_the_predecessor_is_not_given_twice_while_somebody_is_on_the_way(job):
    job.lose(21)
    after = job.successor()
    after.living(10, 11, 20, coming={22: ("worker", 1)})
    assert after.orders() == []
    after.join(22, "worker", 1)
    assert after.view.workers == {0: 20, 1: 22} and after.orders() == []


def test_nobody_else_is_ordered_for_the_seat_of_one_that_died_meanwhile_while_somebody_is_on_the_way(job):
    """The predecessor had let in one that was dead, and knew nothing of who was sent after it."""
    after = job.successor()
    after.living(10, 11, 20, coming={22: ("worker", 1)})
    assert len(after.decisions("lost")) == 1 and after.orders() == []
    after.join(22, "worker", 1)
    assert after.view.workers == {0: 20, 1: 22} and after.orders() == []


def test_another_is_ordered_if_who_was_on_the_way_at_the_takeover_does_not_come(job):
    after = job.successor()
    after.living(10, 11, 20, coming={22: ("worker", 1)})
    after.pass_time(29.0, speaking=(10, 11, 20))
    assert after.orders() == []
    after.pass_time(2.0, speaking=(10, 11, 20))
    assert after.orders() == [MemberOrder(action="start", role="worker", rank=1)]


def test_whoever_is_on_the_way_to_one_seat_does_not_keep_others_from_another(job):
    job.lose(21)
    after = job.successor()
    after.living(10, 11, coming={22: ("worker", 1)})
    assert after.orders() == [MemberOrder(action="start", role="worker", rank=0)]


def test_a_successor_is_told_who_had_done_its_work_and_orders_nobody_for_it(job):
    """It remembers a member that said `done` to its predecessor only, and ended meanwhile."""
    train_all(job)
    after = job.successor()
    after.living(10, 11, 21, left={20: 0})
    assert after.orders() == []
    after.report(21)
    after.report_shards(range(10))
    after.ask(21)
    assert after.ask(21).over
    after.coordinator.on_left(21, 1, after.now)
    assert after.orders() == [] and after.coordinator.finished["clean"]


def test_when_all_have_left_a_successor_counts_by_the_shards_alone(job):
    train_all(job)
    after = job.successor()
    after.living(10, 11, left={20: 0, 21: 1})
    after.report_shards(range(10))
    assert after.orders() == [] and after.coordinator.finished["clean"]


def test_ranks_of_their_own_that_left_are_done_for_a_successor(make_job):
    job = make_job(leased=False, sync="bsp").formed()
    after = job.successor()
    after.living(10, 11, left={20: 0, 21: 1})
    after.report_shards(range(10))
    assert after.orders() == [] and after.coordinator.finished["clean"]


def test_whoever_had_been_told_to_leave_is_not_taken_for_done(job):
    """Its predecessor had fewer workers for a while; cells are left, and the seat is wanted again."""
    after = job.successor()
    after.living(10, 11, 20, left={21: 1})
    assert after.orders() == [], "it may have been done: that is not known yet"
    after.report(20)
    after.ask(20, wanted=0)
    after.report_shards(range(4))
    after.coordinator.on_tick(after.now)
    assert after.orders() == [MemberOrder(action="start", role="worker", rank=1)]


def test_a_filled_backup_stays_filled_and_an_unfilled_one_unfilled(job):
    job.lose(10)
    job.join(12, "server", 0)
    job.fill(0)
    after = job.successor()
    after.coordinator.on_tick(after.now)
    assert [shard.filled for shard in after.shards] == [True, False, False, False]
    after.fill(1, 2, 3)
    assert all(shard.filled for shard in after.shards)


def test_a_successor_learns_who_holds_what_before_it_gives_anything(job):
    assert job.ask(20, wanted=2).cells == [0, 1]
    assert job.ask(21, wanted=2, done=()).cells == [2, 3]
    job.ask(20, wanted=2, done=(0,), held=(1,))
    after = job.successor()
    after.coordinator.on_tick(after.now)
    after.report(20)
    after.report(21)
    assert after.ask(20, wanted=3, held=(1, 4)).cells == [1, 4]
    after.report_shards(range(1))
    assert after.ask(20, wanted=3, held=(1, 4)).cells == [1, 4]
    # From here on all is known: both are answered once more, with something new.
    assert after.ask(21, wanted=3, held=(2, 3)).cells == [2, 3, 6]
    assert after.ask(20, wanted=3, held=(1, 4)).cells == [1, 4, 5]
    assert after.coordinator.committed == 1


def test_what_was_sent_under_the_predecessors_view_does_not_count(job):
    job.ask(20, wanted=1)
    after = job.successor()
    after.coordinator.on_tick(after.now)
    old = job.view.number
    after.report(20, view=old)
    after.report(21, view=old)
    after.report_shards(range(0), view=old)
    after.ask(20, wanted=0)
    assert after.ask(21, wanted=2).cells == []


def test_a_dead_worker_does_not_hold_up_the_successor(job):
    job.ask(20, wanted=2)
    after = job.successor()
    after.living(10, 11, 21)
    after.report(21)
    after.report_shards(range(0))
    after.ask(21, wanted=0)
    assert after.ask(21, wanted=2).cells == [0, 1]


def test_a_cell_that_every_shard_has_is_not_given_again(job):
    assert job.ask(20, wanted=3).cells == [0, 1, 2]
    job.report_shards(range(2))
    job.lose(20)
    assert job.ask(21, wanted=1).cells == [2]
    assert job.coordinator.committed == 2


def train_all(job) -> None:
    cells = tuple(job.ask(20, wanted=10).cells)
    job.ask(20, wanted=0, done=cells)


def test_workers_may_leave_when_every_cell_is_done(job):
    assert job.ask(20, wanted=10).cells == list(range(10))
    waiting = job.ask(21, wanted=1)
    assert waiting.cells == [] and not waiting.over
    assert job.ask(20, wanted=1, done=tuple(range(10))).over
    assert job.ask(21, wanted=1).over


def test_the_audit_is_clean_where_every_shard_has_every_cell(job):
    train_all(job)
    assert job.coordinator.finished is None
    job.report_shards(range(10))
    assert job.coordinator.finished["clean"]
    assert job.decisions("finished")[0]["audit"] == job.coordinator.finished
    assert [row["once"] for row in job.coordinator.finished["shards"]] == [10] * 4


def test_workers_that_leave_after_training_are_not_replaced_but_servers_are(job):
    train_all(job)
    job.report_shards(range(10))
    job.coordinator.on_left(20, 0, job.now)
    job.report(21, done=True)
    job.lose(21)
    assert job.orders() == [] and job.view.workers == {}
    job.lose(10)
    assert [shard.primary for shard in job.shards] == [11] * 4
    assert job.orders() == [MemberOrder(action="start", role="server", rank=0)]


def test_workers_that_are_silent_after_training_are_left_alone(job):
    train_all(job)
    job.pass_time(20.0, speaking=(10, 11))
    assert job.orders() == [] and job.view.workers == {0: 20, 1: 21}


def test_the_audit_names_what_is_missing(job):
    train_all(job)
    job.report_shards(range(9))
    assert job.coordinator.finished is None
    job.report_shards(range(9))
    audit = job.coordinator.finished
    assert not audit["clean"]
    assert audit["shards"][0] | {"never": 1, "missing": [9], "once": 9} == audit["shards"][0]


def test_the_audit_sees_a_cell_that_was_applied_twice(job):
    train_all(job)
    twice = {"cells": [0, 10], "tally": {"applied": 11, "cells": 11}}
    job.report(10, shards={0: twice, 1: twice})
    job.report(11, shards={2: twice, 3: twice})
    audit = job.coordinator.finished
    assert not audit["clean"] and [row["more_than_once"] for row in audit["shards"]] == [1] * 4


def test_ranks_with_their_own_cells_are_done_when_all_say_so(make_job):
    job = make_job(leased=False, sync="bsp").formed()
    job.report(20, done=True)
    job.lose(20)
    assert job.orders() == []
    job.report(21, done=True)
    job.report_shards(range(10))
    assert job.coordinator.finished["clean"]


def test_a_late_push_is_counted_and_its_cell_missing(make_job):
    job = make_job(
        leased=False, sync="quorum:1/2", num_shards=1, shard_bytes=(4,), owners=(0,), backups=(1,)
    ).formed()
    job.report(20, done=True)
    job.report(21, done=True)
    facts = {"cells": [0, 9], "tally": {"applied": 9, "late": 1, "duplicate": 2}}
    job.report(10, shards={0: facts})
    job.report(10, shards={0: facts})
    (row,) = job.coordinator.finished["shards"]
    assert (row["late_pushes"], row["duplicate_pushes"], row["missing"]) == (1, 2, [9])
    assert job.coordinator.finished["clean"]
