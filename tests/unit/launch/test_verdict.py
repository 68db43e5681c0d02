"""Which of several failures is shown."""

from __future__ import annotations

import signal

import pytest

from shoal.launch.verdict import Failure, first_cause

KILLED = Failure(global_rank=0, message="killed", signum=signal.SIGKILL)
REPORTED = Failure(global_rank=1, message="ValueError")
REPORTED_TOO = Failure(global_rank=2, message="ValueError")
CRASHED = Failure(global_rank=3, message="crashed", signum=signal.SIGABRT)
LOST_A_PEER = Failure(global_rank=4, message="peer is gone", consequence=True)


@pytest.mark.parametrize(
    ("noticed", "shown"),
    [
        ([REPORTED, REPORTED_TOO], REPORTED),
        ([REPORTED_TOO, REPORTED], REPORTED_TOO),
        ([CRASHED, REPORTED], REPORTED),
        ([LOST_A_PEER, CRASHED], CRASHED),
        ([REPORTED, LOST_A_PEER, KILLED], KILLED),
        ([LOST_A_PEER], LOST_A_PEER),
    ],
)
def test_the_likeliest_cause_is_shown(noticed: list[Failure], shown: Failure) -> None:
    assert first_cause(noticed) is shown
