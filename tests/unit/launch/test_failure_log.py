"""When a run has had enough of failures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.launch.failure_log import FailureLog, verdict
from shoal.observe.happenings import Raised

SEEN = Raised(step=12, slot=1, sample=57, error="ValueError: bad", final=False)


def test_failures_count_within_a_minute() -> None:
    log = FailureLog(2)
    assert not log.is_too_much(0.0) and not log.is_too_much(30.0)
    assert (
        log.is_too_much(59.0) and log.complaint == "It was failure number 3 within a minute, and max_failures=2."
    )
    assert not log.is_too_much(120.0)


def test_the_same_part_twice_is_poisoned() -> None:
    log = FailureLog(10)
    assert not log.is_poisoned(SEEN)
    assert not log.is_poisoned(replace(SEEN, slot=0))
    assert not log.is_poisoned(replace(SEEN, step=13))
    assert log.is_poisoned(SEEN)


def test_the_verdict_names_what_is_known() -> None:
    assert verdict(SEEN) == (
        "Two processes failed at slot 1 of step 12, so a third would, too: ValueError: bad. The sample that "
        "raises it is number 57. Repair that sample, or leave it out of the data."
    )
    assert "at step 12, so" in verdict(replace(SEEN, slot=None, sample=None))
    assert verdict(replace(SEEN, tried=16, raising=1)) == verdict(SEEN)


@pytest.mark.parametrize(("raising", "share"), [(16, "all of 16"), (13, "13 of 16")])
def test_where_many_samples_raise_none_is_blamed(raising: int, share: str) -> None:
    told = verdict(replace(SEEN, tried=16, raising=raising))
    assert "Repair" not in told
    assert f"not one sample that raises it, but {share} that were tried, number 57 for one: see whether" in told
