"""The sentence about a process that ended without a word."""

from __future__ import annotations

import signal

import pytest

from shoal.launch.deaths import explain_death, signal_name
from shoal.launch.memory_watch import count_oom_kills
from shoal.launch.messages import Ended


@pytest.mark.parametrize(
    ("exit_code", "expected"),
    [
        (3, "Worker 1 ended with exit code 3 before its work was done. Its output is in a.log."),
        (-signal.SIGSEGV, "Worker 1 crashed in native code (SIGSEGV). Its output is in a.log."),
        (-signal.SIGKILL, "Worker 1 was killed from outside (SIGKILL). Its output is in a.log."),
    ],
)
def test_a_death_is_explained(exit_code: int, expected: str) -> None:
    assert explain_death("worker 1", Ended(process=0, exit_code=exit_code, log_name="a.log")) == expected


def test_want_of_memory_says_what_to_do() -> None:
    end = Ended(process=0, exit_code=-signal.SIGKILL, ran_out_of_memory=True)
    sentence = explain_death("worker 1", end)
    assert "memory ran out" in sentence and "smaller batch_size" in sentence


def test_names_of_signals() -> None:
    assert signal_name(9) == "SIGKILL"
    assert signal_name(250) == "signal 250"


def test_the_kernels_count_can_be_read() -> None:
    first = count_oom_kills()
    assert 0 <= first <= count_oom_kills()
