"""Workers and servers come and go while the job runs."""

from __future__ import annotations

import pytest

from shoal.coordinator import MemberOrder
from shoal.ps.messages import NOBODY, Control, Controlled


def start(role: str, rank: int) -> MemberOrder:
    return MemberOrder(action="start", role=role, rank=rank)


def end(role: str, rank: int, node: int) -> MemberOrder:
    return MemberOrder(action="end", role=role, rank=rank, node=node)


def scale(job, **counts) -> None:
    job.coordinator.scale(**counts, now=job.now)


def settle_moves(job) -> int:
    """Fill whatever is being filled until nothing is; how many rounds that took."""
    rounds = 0
    while filling := [n for n, shard in enumerate(job.shards) if shard.backup != NOBODY and not shard.filled]:
        job.fill(*filling)
        rounds += 1
        assert rounds < 50
    return rounds


def primaries(job) -> list[int]:
    return [shard.primary for shard in job.shards]


def test_more_workers_are_ordered_and_counted_by_every_shard(job):
    scale(job, workers=4)
    assert job.orders() == [start("worker", 2), start("worker", 3)]
    controls = job.told(10, Control) + job.told(11, Control)
    assert sorted(control.shard for control in controls) == [0, 1, 2, 3]
    assert all(control.values == {"ranks": [0, 1, 2, 3]} for control in controls)
    job.join(22, "worker", 2)
    assert job.view.workers == {0: 20, 1: 21, 2: 22}
    assert job.ask(22).cells == [0]


def test_fewer_workers_leave_when_they_hold_nothing(job):
    assert job.ask(21, wanted=2).cells == [0, 1]
    scale(job, workers=1)
    assert job.orders() == []
    lease = job.ask(21, wanted=2, done=(0,), held=(1,))
    assert lease.cells == [1] and lease.over
    job.ask(21, done=(1,))
    assert job.orders() == [end("worker", 1, 21)]
    assert job.view.workers == {0: 20}


def test_a_newcomer_that_dies_while_it_is_not_wanted_is_followed_when_it_is(job):
    scale(job, servers=3)
    assert job.orders() == [start("server", 2)]
    scale(job, servers=2)
    job.lose(12, ("server", 2))
    assert job.orders() == []
    scale(job, servers=3)
    assert job.orders() == [start("server", 2)]


def test_a_leaving_worker_that_dies_is_not_replaced_and_its_cells_come_back(job):
    job.ask(21, wanted=2)
    scale(job, workers=1)
    job.lose(21)
    assert job.orders() == []
    assert job.ask(20, wanted=2).cells == [0, 1]


@pytest.mark.parametrize(
    ("changes", "counts", "says"),
    [
        ({"leased": False, "slots": 2, "most_workers": 2}, {"workers": 3}, "--slots sets how many there may be"),
        ({"leased": False, "why_workers_stay": "with via=ring"}, {"workers": 3}, "with via=ring"),
        ({}, {"workers": 0}, "room for 1 to"),
        ({}, {"servers": 0}, "at least one server"),
        ({}, {"servers": 9}, "4 shards with one copy of each, so more than 8 servers would hold nothing"),
        ({"has_copies": True}, {"servers": 3}, "its own group of workers"),
    ],
)
def test_what_cannot_be_is_refused_by_an_event(make_job, changes, counts, says):
    job = make_job(**changes).formed()
    before = job.view
    scale(job, **counts)
    assert says in job.decisions("refused")[0]["why"]
    assert job.view == before and job.orders() == []


def test_a_job_that_does_not_run_yet_is_not_scaled(make_job):
    job = make_job()
    scale(job, workers=3)
    assert "running" in job.decisions("refused")[0]["why"]


def twelve(make_job, **changes):
    values = {
        "num_shards": 12,
        "shard_bytes": (10,) * 12,
        "owners": (0, 1) * 6,
        "backups": (1, 0) * 6,
    }
    return make_job(**{**values, **changes}).formed()


def test_a_new_server_gets_its_share_one_shard_at_a_time_from_each(make_job):
    job = twelve(make_job)
    scale(job, servers=3)
    assert job.orders() == [start("server", 2)]
    assert all(shard.filled for shard in job.shards)
    job.join(12, "server", 2)
    filling = [shard for shard in job.shards if not shard.filled]
    assert sorted(shard.primary for shard in filling) == [10, 11]
    assert {shard.backup for shard in filling} == {12}
    settle_moves(job)
    assert sorted(primaries(job)) == [10] * 4 + [11] * 4 + [12] * 4
    assert all(shard.filled and shard.backup not in (NOBODY, shard.primary) for shard in job.shards)
    assert len(job.decisions("moved")) == 4


def test_a_leaving_server_gives_all_away_before_it_is_ended(make_job):
    job = twelve(make_job, servers=3, owners=(0, 1, 2) * 4, backups=(1, 2, 0) * 4)
    scale(job, servers=2)
    assert job.orders() == []
    assert 12 in job.view.addresses
    settle_moves(job)
    assert sorted(primaries(job)) == [10] * 6 + [11] * 6
    assert all(shard.filled and shard.backup in (10, 11) for shard in job.shards)
    assert job.orders() == [end("server", 2, 12)]
    assert 12 not in job.view.addresses


def test_shards_move_without_replicas_too(make_job):
    job = twelve(make_job, replicas=0, backups=(None,) * 12)
    scale(job, servers=1)
    settle_moves(job)
    assert primaries(job) == [10] * 12
    assert all(shard.backup == NOBODY for shard in job.shards)
    assert job.orders() == [end("server", 1, 11)]


def test_one_server_alone_has_no_backups(make_job):
    job = twelve(make_job)
    scale(job, servers=1)
    settle_moves(job)
    assert primaries(job) == [10] * 12
    assert all(shard.backup == NOBODY for shard in job.shards)
    assert job.orders() == [end("server", 1, 11)]


def test_lost_backups_come_before_moves(make_job):
    job = twelve(make_job, servers=3, owners=(0, 1, 2) * 4, backups=(1, 2, 0) * 4)
    job.lose(10)
    scale(job, servers=4)
    job.join(13, "server", 3)
    uncovered = {number for number, shard in enumerate(job.shards) if not shard.filled}
    assert len(uncovered) == 8
    assert not job.decisions("filling")
    job.fill(*uncovered)
    assert job.decisions("filling")


def test_a_new_server_that_dies_in_a_move_loses_nothing(make_job):
    job = twelve(make_job)
    scale(job, servers=3)
    job.join(12, "server", 2)
    job.lose(12)
    assert sorted(primaries(job)) == [10] * 6 + [11] * 6
    settle_moves(job)
    assert job.coordinator.failed is None
    assert job.orders()[-1] == start("server", 2)
    job.join(13, "server", 2)
    settle_moves(job)
    assert sorted(primaries(job)) == [10] * 4 + [11] * 4 + [13] * 4


def test_a_move_goes_on_under_the_next_coordinator(make_job):
    job = twelve(make_job)
    scale(job, servers=3)
    job.join(12, "server", 2)
    after = job.successor()
    after.coordinator.on_tick(after.now)
    settle_moves(after)
    assert sorted(primaries(after)) == [10] * 4 + [11] * 4 + [12] * 4


def test_a_control_is_repeated_until_confirmed_and_follows_the_shard(job):
    scale(job, workers=3)
    job.clear()
    number = 1
    for shard in (1, 2, 3):
        job.say(job.shards[shard].primary, Controlled(shard=shard, number=number))
    job.pass_time(1.0)
    assert {control.shard for control in job.told(10, Control)} == {0} and not job.told(11, Control)
    job.clear()
    job.lose(10)
    assert [control.shard for control in job.told(11, Control)] == [0]
    after = job.successor()
    after.coordinator.on_tick(after.now)
    assert [control.number for control in after.told(11, Control)] == [number]
    after.say(11, Controlled(shard=0, number=number))
    after.clear()
    after.pass_time(2.0)
    assert not after.told(11, Control)


def test_a_shard_gets_the_next_control_only_after_the_one_before(job):
    scale(job, workers=3)
    scale(job, workers=4)
    job.pass_time(2.0)
    assert {control.number for control in job.told(10, Control)} == {1}
    job.clear()
    job.say(10, Controlled(shard=0, number=1))
    assert [(control.shard, control.number) for control in job.told(10, Control)] == [(0, 2)]


def test_a_worker_that_was_told_to_leave_is_not_called_back(job):
    scale(job, workers=1)
    scale(job, workers=2)
    job.report(21, done=True)
    assert job.orders() == [end("worker", 1, 21), start("worker", 1)]


def test_a_worker_that_was_told_to_leave_does_not_hold_up_the_next_coordinator(job):
    scale(job, workers=1)
    after = job.successor()
    after.coordinator.on_tick(after.now)
    for node in (20, 21):
        after.report(node, done=node == 21)
    after.report_shards(range(0))
    after.ask(20, wanted=0)
    assert after.ask(20, wanted=1).cells == [0]
    after.report(21, done=True)
    assert after.orders() == [end("worker", 1, 21)]


def test_a_move_that_is_called_off_leaves_no_copy_behind(make_job):
    job = twelve(make_job, replicas=0, backups=(None,) * 12)
    scale(job, servers=3)
    job.join(12, "server", 2)
    scale(job, servers=2)
    settle_moves(job)
    assert sorted(primaries(job)) == [10] * 6 + [11] * 6
    assert all(shard.backup == NOBODY for shard in job.shards)
    assert job.orders()[-1] == end("server", 2, 12)


def test_a_replacement_does_not_start_moves_of_its_own(make_job):
    job = twelve(make_job)
    scale(job, servers=3)
    job.join(12, "server", 2)
    settle_moves(job)
    job.lose(12)
    job.join(13, "server", 2)
    settle_moves(job)
    assert 13 not in primaries(job) and len(job.decisions("moved")) == 4


def dealt(make_job, **changes):
    """A job in which every worker has slots of its own."""
    return make_job(leased=False, sync="bsp", slots=4, most_workers=4, **changes).formed()


def deal_of(job) -> tuple[list[int], list[int]]:
    """By slot who fills it, and which are wanted by another."""
    deal = job.view.settings["deal"]
    return [node for node, _ in deal["slots"]], deal["recalled"]


def test_a_slot_is_given_to_another_when_its_owner_has_let_it_go(make_job):
    job = dealt(make_job)
    assert deal_of(job) == ([20, 20, 21, 21], [])
    scale(job, workers=1)
    assert deal_of(job) == ([20, 20, 21, 21], [2, 3])
    job.report(21, dealt=job.view.number - 1)
    assert deal_of(job) == ([20, 20, 21, 21], [2, 3]), "what it said was of a view before"
    job.report(21, dealt=job.view.number)
    assert deal_of(job) == ([20, 20, 20, 20], []) and job.orders() == [end("worker", 1, 21)]
    assert [lives for _, lives in job.view.settings["deal"]["slots"]] == [0, 0, 1, 1]


def test_nothing_is_recalled_for_who_has_not_come(make_job):
    job = dealt(make_job)
    scale(job, workers=4)
    assert deal_of(job) == ([20, 20, 21, 21], [1]), "the second is there to take one"
    assert job.orders() == [start("worker", 2), start("worker", 3)]
    job.join(22, "worker", 2)
    assert deal_of(job) == ([20, 20, 21, 21], [1, 2])
    job.lose(22)
    assert deal_of(job) == ([20, 20, 21, 21], [1]), "it stays where it is"


def test_the_slots_of_a_dead_worker_wait_for_its_successor_or_go_to_the_others(make_job):
    job = dealt(make_job)
    job.lose(21)
    assert deal_of(job) == ([20, 20, NOBODY, NOBODY], [])
    scale(job, workers=1)
    assert deal_of(job) == ([20, 20, 20, 20], [])


def test_a_successor_goes_on_with_the_deal(make_job):
    job = dealt(make_job)
    scale(job, workers=1)
    recalled_in, after = job.view.number, job.successor()
    after.living(10, 11, 20, 21)
    assert deal_of(after) == ([20, 20, 21, 21], [2, 3])
    after.report(21, dealt=recalled_in)
    assert deal_of(after) == ([20, 20, 20, 20], [])


@pytest.mark.parametrize("role", ["worker", "server"])
def test_who_comes_when_fewer_are_wanted_is_sent_away_and_followed_when_more_are(make_job, role):
    job, more, fewer = dealt(make_job), {f"{role}s": 3}, {f"{role}s": 2}
    scale(job, **more)
    assert job.orders() == [start(role, 2)]
    scale(job, **fewer)
    job.join(30, role, 2)
    assert job.orders() == [end(role, 2, 30)]
    scale(job, **more)
    assert job.orders() == [start(role, 2)]


def test_who_was_told_to_leave_by_a_coordinator_that_died_is_told_again(make_job):
    job = dealt(make_job)
    scale(job, workers=1)
    job.report(21, dealt=job.view.number)
    after = job.successor()
    after.living(10, 11, 20, 21)
    assert end("worker", 1, 21) in after.orders()


def test_a_worker_that_was_told_to_leave_does_not_count_as_done(make_job):
    job = dealt(make_job)
    scale(job, workers=1)
    job.report(21, dealt=job.view.number)
    job.coordinator.on_left(21, 1, job.now)
    scale(job, workers=2)
    assert job.orders()[-1] == start("worker", 1)


def test_while_all_come_to_a_border_no_slot_changes_hands(make_job):
    job = dealt(make_job)
    job.report(20, hold=1)
    scale(job, workers=1)
    assert deal_of(job)[1] == []
    job.report(20, hold=1, released=1)
    assert deal_of(job)[1] == [2, 3]


def test_a_border_is_not_before_a_slot_whose_new_owner_has_not_said_how_far_it_is(make_job):
    job = dealt(make_job)
    scale(job, workers=1)
    recalled_in = job.view.number
    job.report(20, hold=1, dealt=1)
    job.report(20, hold=1, dealt=1, held=[1, 4])
    job.report(21, dealt=recalled_in)
    assert deal_of(job)[0] == [20, 20, 20, 20] and job.view.settings["hold"] == [1, None]
    job.report(20, hold=1, dealt=1, held=[1, 4])
    assert job.view.settings["hold"] == [1, None], "it spoke of the slots that it had before"
    job.report(20, hold=1, dealt=job.view.number, held=[1, 5])
    assert job.view.settings["hold"] == [1, 5]
