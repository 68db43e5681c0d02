"""The benchmark's bandwidths: arithmetic, and what a failed measurement says."""

import pytest

from benchmarks import bandwidth
from shoal.errors import LaunchError


def test_ways_take_turns_and_the_first_time_does_not_count(monkeypatch):
    clock, order = [0.0], []

    def way(name, seconds):
        def move():
            order.append(name)
            clock[0] += seconds * (100 if len(order) <= 2 else 1)

        return move

    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: clock[0])
    speeds = bandwidth.speeds_of({"slow": way("slow", 2.0), "fast": way("fast", 0.5)}, nbytes=10, rounds=2)
    assert speeds == {"slow": [pytest.approx(5)] * 2, "fast": [pytest.approx(20)] * 2}
    assert order[2:] in (["slow", "fast", "fast", "slow"], ["fast", "slow", "slow", "fast"])


def test_every_bar_names_ways_that_are_measured():
    for bar in bandwidth.BARS:
        assert bar.peer == ("bare ZeroMQ" if "tcp" in bar.subject else "memcpy")


def test_a_failed_measurement_shows_what_it_said(monkeypatch):
    monkeypatch.setattr(bandwidth.sys, "executable", "/bin/false")
    with pytest.raises(LaunchError, match="`/bin/false -m benchmarks"):
        bandwidth.measure_bandwidth(1)
