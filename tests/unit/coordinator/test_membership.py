"""Forming, losses, promotions, refills and evictions."""

from __future__ import annotations

import pytest

from shoal.coordinator import JobPlan, MemberOrder, StoreError
from shoal.coordinator.upkeep import STORE_PATIENCE_S
from shoal.errors import SpecError
from shoal.ps.between_servers import Filled
from shoal.ps.messages import NOBODY, Ack, Join, Report


def start(role: str, rank: int) -> MemberOrder:
    return MemberOrder(action="start", role=role, rank=rank)


def test_the_first_view_waits_for_all_servers_and_counts_copies_as_filled(make_job):
    job = make_job()
    job.join(10, "server", 0)
    job.join(20, "worker", 0)
    assert job.coordinator.view is None and not job.coordinator.outbox
    job.join(11, "server", 1)
    assert (job.view.term, job.view.number) == (1, 1)
    assert job.view.shards == [[1, 10, 11, True, 0]] * 2 + [[1, 11, 10, True, 0]] * 2
    assert job.view.workers == {0: 20}
    assert job.view.addresses == {node: f"tcp://127.0.0.1:{node}" for node in (10, 11, 20)}
    assert all(job.told(node) == [job.view] for node in (10, 11, 20))


def test_workers_are_added_as_they_come_and_change_no_generation(make_job):
    job = make_job()
    for node, role, rank in ((10, "server", 0), (11, "server", 1), (21, "worker", 1)):
        job.join(node, role, rank)
    assert job.view.number == 2 and job.view.workers == {1: 21}
    assert {shard.generation for shard in job.shards} == {1}


def test_too_few_servers_is_a_failure_that_says_so(make_job):
    job = make_job(form_timeout_s=10.0)
    job.join(10, "server", 0)
    job.pass_time(11.0)
    assert "Only 1 of 2 servers" in job.coordinator.failed


def test_a_lost_server_is_covered_by_its_filled_backups_and_replaced(job):
    job.lose(10)
    assert job.view.number == 4
    assert job.view.shards == [[4, 11, NOBODY, False, 1]] * 2 + [[4, 11, NOBODY, False, 0]] * 2
    assert job.orders() == [start("server", 0)]
    assert job.decisions("promoted")[0]["shards"] == [0, 1]
    assert 10 not in job.view.addresses


def test_the_replacement_is_filled_before_it_counts(job):
    job.lose(10)
    job.join(12, "server", 0)
    assert [(shard.backup, shard.filled) for shard in job.shards] == [(12, False)] * 4
    generations = [shard.generation for shard in job.shards]
    job.fill(0, 1, 2, 3)
    assert [(shard.backup, shard.filled) for shard in job.shards] == [(12, True)] * 4
    assert [shard.generation for shard in job.shards] == generations
    job.lose(11)
    assert [shard.primary for shard in job.shards] == [12] * 4
    assert [shard.copy for shard in job.shards] == [0, 0, 1, 1]
    assert job.coordinator.failed is None


def test_filled_counts_only_from_the_primary_in_this_generation(job):
    job.lose(10)
    job.join(12, "server", 0)
    generation = job.shards[0].generation
    job.say(12, Filled(shard=0, generation=generation, index=0))
    job.say(11, Filled(shard=0, generation=generation - 1, index=0))
    job.say(11, Filled(shard=99, generation=generation, index=0))
    assert not job.shards[0].filled


def test_with_three_servers_a_survivor_becomes_the_new_backup_at_once(make_job):
    job = make_job(num_shards=3, shard_bytes=(9, 9, 9), servers=3, owners=(0, 1, 2), backups=(1, 2, 0)).formed()
    job.lose(10)
    assert [(shard.primary, shard.backup) for shard in job.shards] == [(11, 12), (11, 12), (12, 11)]
    assert [shard.filled for shard in job.shards] == [False, True, False]


def test_a_shard_that_nobody_else_has_ends_the_job(job):
    job.lose(10)
    job.join(12, "server", 0)
    job.fill(0)
    job.lose(11)
    assert "nobody else has all of shard 1" in job.coordinator.failed
    assert job.view.settings["stop"] == job.coordinator.failed
    job.lose(12)
    assert len(job.decisions("failed")) == 1


def test_without_replicas_the_loss_of_a_server_ends_the_job(make_job):
    job = make_job(replicas=0, backups=(None,) * 4).formed()
    job.lose(11)
    assert "shard 2" in job.coordinator.failed


def test_a_lost_worker_is_replaced_and_its_cells_go_to_others(job):
    assert job.ask(20, wanted=2).cells == [0, 1]
    job.lose(20)
    assert job.view.workers == {1: 21}
    assert job.orders() == [start("worker", 0)]
    assert job.ask(21, wanted=3).cells == [0, 1, 2]
    job.join(22, "worker", 0)
    assert job.view.workers == {0: 22, 1: 21}


def test_a_node_that_is_gone_never_comes_back(job):
    job.lose(20)
    job.clear()
    job.join(20, "worker", 0)
    assert 0 not in job.view.workers
    assert job.told(20) == [job.view]


def test_a_seat_is_kept_by_who_has_it_and_goes_to_who_waits(job):
    job.join(30, "worker", 0)
    assert job.view.workers[0] == 20
    job.lose(20)
    assert job.view.workers[0] == 30 and job.orders() == []


def test_a_replacement_that_does_not_come_is_ordered_again(job):
    job.lose(20)
    assert job.orders() == [start("worker", 0)]
    job.pass_time(29.0, speaking=(10, 11, 21))
    assert job.orders() == []
    job.pass_time(2.0, speaking=(10, 11, 21))
    assert job.orders() == [start("worker", 0)]


def test_a_replacement_that_dies_before_it_joins_is_ordered_again_at_once_but_not_for_ever(make_job):
    job = make_job(max_failures=3).formed()
    job.lose(20)
    job.orders()
    for node in (30, 31):
        job.lose(node, ("worker", 0))
        assert job.orders() == [start("worker", 0)]
    job.lose(32, ("worker", 0))
    assert "4 members were lost" in job.coordinator.failed


@pytest.mark.parametrize("role", ["worker", "server"])
def test_whoever_dies_before_it_joins_at_the_start_is_followed_at_once(make_job, role):
    """As one that the kernel kills for want of memory while it builds its model."""
    job = make_job()
    for node, other, rank in ((10, "server", 0), (21, "worker", 1)):
        job.join(node, other, rank)
    job.clear()
    job.lose(30, (role, 0 if role == "worker" else 1))
    assert job.orders() == [start(role, 0 if role == "worker" else 1)]
    job.coordinator.on_tick(job.now)
    assert job.orders() == []


def test_who_died_before_the_coordinator_could_hear_is_followed_at_once(make_job):
    job = make_job()
    job.coordinator.on_living({10: ("server", 0), 11: ("server", 1), 20: ("worker", 0)}, job.now)
    assert job.orders() == [start("worker", 1)]


def test_a_dismissed_member_that_ends_is_not_missed(job):
    job.coordinator.scale(workers=1, now=job.now)
    job.ask(21)
    assert [order.action for order in job.orders()] == ["end"]
    job.lose(21, ("worker", 1))
    assert job.orders() == []


def test_a_silent_member_is_ended_and_replaced(job):
    job.pass_time(4.0, speaking=(10, 20, 21))
    assert 11 in job.view.addresses
    job.pass_time(2.0, speaking=(10, 20, 21))
    assert [shard.primary for shard in job.shards] == [10] * 4
    assert job.orders() == [MemberOrder(action="end", role="server", rank=1, node=11), start("server", 1)]


def test_silence_of_everybody_is_not_taken_for_death(job):
    job.pass_time(20.0)
    assert job.orders() == [] and len(job.view.addresses) == 4


def test_silence_while_the_coordinator_itself_stood_still_does_not_count(job):
    job.now += 100.0
    job.report(10)
    job.coordinator.on_tick(job.now)
    assert job.orders() == [] and len(job.view.addresses) == 4


def test_a_silent_server_that_nobody_can_replace_is_waited_for(make_job):
    job = make_job(replicas=0, backups=(None,) * 4, form_timeout_s=20.0).formed()
    job.pass_time(15.0, speaking=(10, 20, 21))
    assert job.coordinator.failed is None
    job.pass_time(10.0, speaking=(10, 20, 21))
    assert job.coordinator.failed is not None


def test_members_that_die_without_progress_end_the_job(make_job):
    job = make_job(max_failures=3).formed()
    for replacement in (30, 31, 32):
        job.lose(job.view.workers[0])
        job.join(replacement, "worker", 0)
    assert job.coordinator.failed is None
    job.lose(32)
    assert "4 members were lost while nothing was trained" in job.coordinator.failed


def test_progress_forgives_failures(make_job):
    job = make_job(max_failures=1).formed()
    for turn in range(5):
        worker = job.view.workers[0]
        cell = job.ask(worker).cells[0]
        job.ask(worker, done=(cell,), wanted=0)
        job.lose(worker)
        job.join(30 + turn, "worker", 0)
    assert job.coordinator.failed is None and job.coordinator.committed == 5


def test_an_old_view_number_is_answered_with_the_newest_view(job):
    job.report(20)
    assert job.told(20) == []
    job.report(20, view=1)
    assert job.told(20) == [job.view]


def test_strange_messages_are_counted_and_change_nothing(job):
    before = job.view
    job.say(20, Join(node=21, role="worker", rank=0, address=""))
    job.join(77, "janitor", 0)
    job.say(20, Report(node=11, role="server", rank=1, view=1, facts={}))
    job.say(20, Ack(shard=0, generation=1, sequence=1, outcome="applied", version=1, floor=0, rounds=0))
    job.report(10, shards=[1, 2])
    job.report(10, shards={0: {"cells": "all"}})
    job.report(10, shards={0: {"cells": [], "delay_mean": "long"}})
    assert job.view == before
    assert job.coordinator.ignored.total() == 7


def test_nothing_is_told_that_could_not_be_saved(job):
    save = job.store.save

    def refuse(term: int, state: dict) -> None:
        raise StoreError("the disk is full")

    job.store.save = refuse
    job.lose(20)
    job.report(21, view=0)
    assert job.view.workers == {0: 20, 1: 21}
    assert all(view.number == 3 for view in job.told(21))
    assert "the disk is full" in job.decisions("unsaved")[0]["why"]
    job.store.save = save
    job.pass_time(1.5, speaking=(10, 11, 21))
    assert job.view.workers == {1: 21} and job.view.number == 4


def test_a_store_that_refuses_for_long_ends_the_job_with_a_sentence(job):
    def refuse(term: int, state: dict) -> None:
        raise StoreError("the disk is full")

    job.store.save = refuse
    job.lose(20)
    job.pass_time(STORE_PATIENCE_S - 2.0, speaking=(10, 11, 21))
    assert job.coordinator.failed is None and len(job.decisions("unsaved")) == 1, "told once, not every second"
    job.pass_time(4.0, speaking=(10, 11, 21))
    assert "For 15 s nothing that was decided could be saved: the disk is full" in job.coordinator.failed


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"backups": (0, 0, 0, 0)}, "two different servers"),
        ({"owners": (0, 0, 1, 2)}, "out of 2"),
        ({"owners": (0, 0)}, "4 shards"),
        ({"replicas": 2}, "0 or 1"),
        ({"adjust": ("luck",)}, "luck"),
        ({"num_cells": -1}, "num_cells"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(job, wrong, says):
    values = {name: getattr(job.plan, name) for name in JobPlan.__dataclass_fields__}
    with pytest.raises(SpecError, match=says):
        JobPlan(**{**values, **wrong})


def outliving(make_job):
    return make_job(replicas=0, backups=(None,) * 4, shares_memory=True, outlives_servers=True).formed()


def test_where_memory_outlives_its_servers_the_next_goes_on_with_a_lost_ones_shards(make_job):
    job = outliving(make_job)
    job.lose(11)
    assert job.coordinator.failed is None
    assert [shard.primary for shard in job.shards] == [10, 10, NOBODY, NOBODY]
    assert [(order.action, order.role, order.rank) for order in job.orders()] == [("start", "server", 1)]
    job.join(12, "server", 1)
    assert [(shard.primary, shard.copy) for shard in job.shards] == [(10, 0), (10, 0), (12, 0), (12, 0)]
    assert len(job.decisions("adopted")) == 2


def test_a_place_is_not_passed_on_while_its_last_server_may_live(make_job):
    job = outliving(make_job)
    job.pass_time(70.0, speaking=(10, 20, 21))
    assert len(job.decisions("lost")) == 1
    job.join(12, "server", 1)
    assert [shard.primary for shard in job.shards] == [10, 10, NOBODY, NOBODY]
    job.lose(11)
    assert [shard.primary for shard in job.shards] == [10, 10, 12, 12]


def test_a_successor_of_the_coordinator_knows_the_shards_without_a_primary(make_job):
    job = outliving(make_job)
    job.lose(11)
    successor = job.successor()
    living = {10: ("server", 0), 20: ("worker", 0), 21: ("worker", 1)}
    successor.coordinator.on_living(living, 0.0)
    successor.join(12, "server", 1)
    assert [shard.primary for shard in successor.shards] == [10, 10, 12, 12]
