"""Slow workers of the benchmark: who is slow when, and by how much."""

import pytest
import torch
from torch import nn

from benchmarks import contests, straggler
from benchmarks.compare import SpeedRow
from benchmarks.measurement import Measurement
from benchmarks.straggler import SLOWDOWN, STEP_PER_FORWARD, STRAGGLERS, slowed
from benchmarks.tasks import task
from shoal.errors import SpecError


class Busy(nn.Module):
    """A forward pass that takes exactly 10 ms of processor time, by the clock that is given."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.clock[0] += 0.01
        return inputs


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for `Busy`, and the sleeps that were asked for."""
    now, sleeps = [0.0], []
    monkeypatch.setattr(straggler.time, "thread_time", lambda: now[0])
    monkeypatch.setattr(straggler.time, "sleep", sleeps.append)
    return now, sleeps


def test_a_lasting_straggler_is_one_worker_all_the_time():
    slow = STRAGGLERS["lasting"]
    assert [[slow(rank, 3, step) for rank in range(3)] for step in (0, 5)] == [[False, False, True]] * 2


def test_an_alternating_slow_down_is_at_one_worker_at_a_time_for_three_steps():
    slow = STRAGGLERS["alternating"]
    whose = [[rank for rank in range(2) if slow(rank, 2, step)] for step in range(9)]
    assert whose == [[0]] * 3 + [[1]] * 3 + [[0]] * 3


def test_a_slow_step_sleeps_three_times_its_computing(clock):
    now, sleeps = clock
    model = slowed(Busy(now), "alternating", rank=1, processes=2)
    for _ in range(6):
        model(torch.zeros(1))
    assert sleeps == pytest.approx([0.01 * STEP_PER_FORWARD * (SLOWDOWN - 1)] * 3)


def test_evaluation_is_not_slowed_and_counts_no_step(clock):
    now, sleeps = clock
    model = slowed(Busy(now), "alternating", rank=0, processes=2).eval()
    for _ in range(10):
        model(torch.zeros(1))
    assert sleeps == []
    model.train()(torch.zeros(1))
    assert len(sleeps) == 1


@pytest.mark.parametrize(("rank", "is_slow"), [("0", False), ("1", True)])
def test_a_task_knows_its_worker_by_its_rank(rank, is_slow, monkeypatch):
    sleeps = []
    monkeypatch.setattr(straggler.time, "sleep", sleeps.append)
    monkeypatch.setenv("SHOAL_RANK", rank)
    task("digits", straggler="lasting").model()(torch.randn(32, 64))
    assert (len(sleeps) == 1 and sleeps[0] > 0) is is_slow


def test_without_a_straggler_the_model_is_untouched_and_a_wrong_one_is_named():
    assert not task("digits").model()._forward_hooks
    with pytest.raises(SpecError, match="Did you mean 'lasting'"):
        task("digits", straggler="lastin").model()


def test_every_variant_of_a_contest_meets_the_same_straggler():
    for contest in contests.CONTESTS:
        for name, command in contest.variants.items():
            argv = command(contests.MODEL, 2, 7)
            assert argv[-2:] == ["--straggler", contest.straggler] and name in argv and "7" in argv
        assert all({bar.subject, bar.peer} <= set(contest.variants) for bar in contest.bars)


def row(variant, speed):
    run = Measurement(
        variant=variant,
        model=contests.MODEL,
        processes=2,
        step_s=128 / speed,
        spread=0.0,
        samples_per_s=speed,
        loss=1.0,
    )
    return SpeedRow(variant=variant, model=contests.MODEL, rounds=(run,))


def test_a_contest_has_its_own_winner():
    rows = [row("ddp", 100.0), row("ps_asp", 190.0), row("ps_bsp", 100.0), row("ps_ssp_3", 120.0)]
    rows.append(row("ps_ssp_3_speed", 156.0))
    found = [contest.judge(rows) for contest in contests.CONTESTS]
    assert [labelled[0].model for labelled, _ in found] == ["lasting 4x", "alternating 4x"]
    assert [(bar.bar.subject, bar.ratio, bar.met) for _, verdicts in found for bar in verdicts] == [
        ("ps_asp", 1.9, True),
        ("ps_ssp_3", 1.2, True),  # Nothing is promised here.
        ("ps_ssp_3_speed", 1.3, True),
        ("ps_ssp_3", 1.2, False),
    ]
