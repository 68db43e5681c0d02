"""When a run saves, as it is written."""

from __future__ import annotations

import math

import pytest

from shoal.errors import SpecError
from shoal.spec.checkpointing import CheckpointRule, best_interval_s


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("every=200", CheckpointRule(every_steps=200)),
        ("every=30s", CheckpointRule(every_s=30.0)),
        ("every=5m,keep=7", CheckpointRule(every_s=300.0, keep=7)),
        ("every=1.5h", CheckpointRule(every_s=5400.0)),
        ("every=250ms", CheckpointRule(every_s=0.25)),
        ("auto", CheckpointRule(auto=True)),
        ("auto, keep=1", CheckpointRule(auto=True, keep=1)),
        ("none", CheckpointRule()),
    ],
)
def test_written_forms(text, rule):
    assert CheckpointRule.parse(text) == rule
    assert CheckpointRule.parse(str(rule)) == rule
    assert rule.is_off is (text == "none")


def test_a_time_is_written_without_loss():
    for seconds in (1 / 3, 12345.678901, 1e-3, 3599.9999999):
        assert CheckpointRule.parse(str(CheckpointRule(every_s=seconds))).every_s == seconds


@pytest.mark.parametrize(
    "text",
    [
        "every",
        "every=",
        "every=0",
        "every=-3",
        "every=1.5",
        "every=0s",
        "every=5d",
        "every=٣",
        "often",
        "auto,keep=0",
        "auto,keep=x",
        "auto,keep=1,keep=2",
        "auto,all=3",
        "auto,",
        "every=1s,every=2s",
    ],
)
def test_what_cannot_be_read_is_refused(text):
    with pytest.raises(SpecError, match="Checkpoint rule"):
        CheckpointRule.parse(text)


def test_the_ways_exclude_each_other():
    with pytest.raises(SpecError, match="exclude each other"):
        CheckpointRule(every_steps=3, auto=True)


def due(rule, *, step=101, last_step=100, seconds_since=0.0, save_s=1.0, failures_per_s=0.0):
    return CheckpointRule.parse(rule).is_due(
        step=step,
        last_step=last_step,
        seconds_since=seconds_since,
        save_s=save_s,
        failures_per_s=failures_per_s,
    )


def test_by_steps():
    assert [step for step in range(1, 11) if due("every=5", step=step, last_step=0 if step <= 5 else 5)] == [5, 10]
    # Steps may be left out, and a resumed run falls in with the unbroken one.
    assert due("every=50", step=203, last_step=190) and not due("every=50", step=203, last_step=201)


def test_by_time():
    assert due("every=30s", seconds_since=30.0) and not due("every=30s", seconds_since=29.9)
    assert not due("every=30s", step=100, seconds_since=99.0)
    assert not due("none", seconds_since=1e9)


def test_auto_follows_save_time_and_failure_rate():
    assert best_interval_s(2.0, 0.01) == pytest.approx(20.0)
    assert best_interval_s(1e-9, 1.0) == 10.0 and best_interval_s(1e6, 1e-6) == 600.0
    assert best_interval_s(2.0, 0.0) == math.sqrt(2 * 2.0 * 3600)
    assert due("auto", seconds_since=20.1, save_s=2.0, failures_per_s=0.01)
    assert not due("auto", seconds_since=19.9, save_s=2.0, failures_per_s=0.01)
