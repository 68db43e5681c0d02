"""What is adjusted, and with how much patience."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator import MemberOrder, policy
from shoal.ps.messages import Control, Controlled


@given(st.dictionaries(st.integers(0, 20), st.floats(0.01, 1e6), min_size=2, max_size=8))
def test_shares_sum_to_the_workers_and_stay_once_they_fit(speeds):
    shares = policy.shares_by_speed(speeds, {})
    if shares is None:
        assert max(speeds.values()) < 1.4 * min(speeds.values())
        return
    assert sum(shares.values()) == pytest.approx(len(speeds))
    assert sorted(shares, key=lambda rank: (shares[rank], rank)) != [] and min(shares.values()) > 0
    assert policy.shares_by_speed(speeds, shares) is None


def test_shares_follow_speed_and_ignore_noise():
    assert policy.shares_by_speed({0: 100.0, 1: 25.0}, {}) == {0: 1.6, 1: 0.4}
    assert policy.shares_by_speed({0: 100.0, 1: 95.0}, {}) is None
    assert policy.shares_by_speed({0: 100.0, 1: 0.0}, {}) is None
    assert policy.shares_by_speed({0: 100.0}, {}) is None


@pytest.mark.parametrize(
    ("waiting", "loss", "expected"),
    [(0.5, 0.8, 4), (0.1, 0.8, 3), (0.5, 0.995, 3), (0.5, 1.2, 2), (0.0, 1.2, 2)],
)
def test_the_bound_rises_where_waiting_dominates_and_falls_where_the_loss_rises(waiting, loss, expected):
    assert policy.next_bound(3, 3, waiting=waiting, loss=loss, loss_before=1.0) == expected


def test_the_bound_has_limits():
    assert policy.next_bound(12, 3, waiting=0.9, loss=0.5, loss_before=1.0) == 12
    assert policy.next_bound(1, 3, waiting=0.0, loss=2.0, loss_before=1.0) == 1


def test_the_rate_falls_with_delay_and_ignores_small_changes():
    assert policy.rate_by_delay(4.0, 4, 1.0) == 0.5
    assert policy.rate_by_delay(0.5, 4, 1.0) == 1.0


def test_divergence_is_no_number_or_far_above_the_best():
    assert policy.is_diverging(math.nan, first=2.0, best=1.0)
    assert policy.is_diverging(math.inf, first=2.0, best=1.0)
    assert policy.is_diverging(4.1, first=2.0, best=1.0)
    assert not policy.is_diverging(3.9, first=2.0, best=1.0)
    assert not policy.is_diverging(0.1, first=2.0, best=0.01)
    assert not policy.is_diverging(-1.0, first=2.0, best=-5.0)


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(2.0, 4.1, True), (2.0, 3.9, False), (-1.0, -1.5, False), (-1.0, -0.5, False), (-1.0, 0.5, True)],
)
def test_a_run_has_diverged_where_its_loss_rose_by_more_than_it_was(first, last, expected):
    assert policy.has_diverged(last, first=first) is expected
    assert policy.has_diverged(math.nan, first=first)


def test_the_hopeless_are_far_below_the_median():
    assert policy.hopeless({0: 100.0, 1: 100.0, 2: 4.0}) == {2}
    assert policy.hopeless({0: 100.0, 1: 100.0, 2: 6.0}) == set()
    assert policy.hopeless({0: 0.0}) == set()


MEMBERS = (10, 11, 20, 21)


def run(job, seconds: float, **facts) -> None:
    """Time passes; both workers report these facts all the while, and shards confirm what they are told."""
    end = job.now + seconds
    while job.now < end:
        job.now += 0.25
        for node in MEMBERS:
            job.report(node, **{name: f(node) if callable(f) else f for name, f in facts.items()})
        job.coordinator.on_tick(job.now)
        for to, message in list(job.coordinator.outbox):
            if isinstance(message, Control) and to == job.shards[message.shard].primary:
                job.say(to, Controlled(shard=message.shard, number=message.number))


def controls(job) -> list[tuple[str, dict]]:
    """The decisions that shard 0 was told, in order."""
    told = {
        c.number: (c.action, c.values)
        for to, c in job.coordinator.outbox
        if isinstance(c, Control) and c.shard == 0
    }
    return [told[number] for number in sorted(told)]


def test_values_are_marked_while_the_loss_is_healthy(make_job):
    job = make_job(adjust=("divergence",), mark_every_s=5.0).formed()
    run(job, 14.0, loss=2.0)
    assert controls(job) == [("mark", {})] * 3


def test_a_diverging_loss_is_rolled_back_at_half_the_rate_and_in_the_end_stopped(make_job):
    job = make_job(adjust=("divergence",), mark_every_s=0.5).formed()
    run(job, 5.0, loss=2.0)
    job.clear()
    run(job, 1.0, loss=math.nan)
    assert controls(job) == []
    run(job, 2.0, loss=math.nan)
    assert controls(job) == [("rollback", {}), ("scale", {"factor": 0.5})]
    assert "nan" in job.decisions("rollback")[0]["why"]
    run(job, 40.0, loss=math.nan)
    assert [event["factor"] for event in job.decisions("rollback")] == [0.5, 0.25, 0.125]
    assert "3 rollbacks did not help" in job.coordinator.failed
    assert job.view.settings["stop"] == job.coordinator.failed


def test_a_run_that_recovers_goes_on(make_job):
    job = make_job(adjust=("divergence",)).formed()
    run(job, 5.0, loss=2.0)
    run(job, 6.0, loss=50.0)
    run(job, 30.0, loss=2.0)
    assert len(job.decisions("rollback")) == 1 and job.coordinator.failed is None


def test_one_bad_batch_is_not_a_divergence(make_job):
    job = make_job(adjust=("divergence",)).formed()
    run(job, 5.0, loss=2.0)
    run(job, 1.0, loss=math.inf)
    run(job, 5.0, loss=2.0)
    assert not job.decisions("rollback")


def test_rollbacks_are_remembered_by_the_next_coordinator(make_job):
    job = make_job(adjust=("divergence",)).formed()
    run(job, 5.0, loss=2.0)
    run(job, 10.0, loss=math.nan)
    assert len(job.decisions("rollback")) == 2
    after = job.successor()
    after.coordinator.on_tick(after.now)
    run(after, 20.0, loss=math.nan)
    assert [event["factor"] for event in after.decisions("rollback")] == [0.125]
    assert after.coordinator.failed


def test_shares_are_told_in_the_view(make_job):
    job = make_job(adjust=("shares",), leased=False, sync="ssp:3").formed()
    run(job, 10.0, samples_per_s=lambda node: 300.0 if node == 20 else 100.0)
    assert job.view.settings["shares"] == pytest.approx({0: 1.5, 1: 0.5})
    assert len(job.decisions("shares")) == 1


def test_the_bound_is_told_in_the_view(make_job):
    job = make_job(adjust=("bound",), leased=False, sync="ssp:3").formed()
    run(job, 30.0, waiting=0.6, loss=lambda node: 2.0 * 0.98**job.now)
    assert job.view.settings["bound"] > 3
    assert job.decisions("bound")[0] | {"before": 3, "bound": 4} == job.decisions("bound")[0]


def test_the_rate_is_scaled_by_staleness(make_job):
    job = make_job(adjust=("rate",)).formed()
    shard = {"cells": [], "delay_mean": 2.0}
    run(job, 5.0, shards=dict.fromkeys(range(4), shard))
    assert controls(job) == [("scale", {"factor": 0.5})]


def test_a_hopelessly_slow_worker_is_replaced_but_not_at_once(make_job):
    job = make_job(adjust=("eviction",)).formed()
    run(job, 9.0, samples_per_s=lambda node: 1.0 if node == 21 else 500.0)
    assert job.orders() == []
    run(job, 3.0, samples_per_s=lambda node: 1.0 if node == 21 else 500.0)
    assert job.orders()[:2] == [
        MemberOrder(action="end", role="worker", rank=1, node=21),
        MemberOrder(action="start", role="worker", rank=1),
    ]


def test_nothing_is_adjusted_that_was_not_asked_for(job):
    run(job, 30.0, loss=math.nan, samples_per_s=lambda node: 1.0 * node**9, waiting=0.9)
    assert controls(job) == [] and job.view.settings == {} and job.coordinator.failed is None
