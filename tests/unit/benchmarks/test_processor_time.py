"""Processor time of what runs in network namespaces."""

import subprocess
import sys
import time

import pytest

from benchmarks.measurement import summarise
from benchmarks.namespaces import Network, why_not
from benchmarks.processor_time import ProcessorClock

BUSY = "import time; [None for _ in iter(lambda: time.process_time() < 0.6, False)]; time.sleep(0.6)"


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_what_runs_there_is_counted_and_nothing_else():
    with Network(2) as network, ProcessorClock(host.name for host in network.hosts) as clock:
        began_at = time.time()
        here = subprocess.Popen([sys.executable, "-c", BUSY])
        there = [subprocess.Popen(host.command([sys.executable, "-c", BUSY])) for host in network.hosts]
        for process in (here, *there):
            assert process.wait(60) == 0
        took_s = time.time() - began_at
        run = summarise(
            variant="busy",
            model="none",
            processes=2,
            batch_per_process=1,
            step_times_s=[took_s / 2] * 2,
            loss=0.0,
            ended_at=began_at + took_s,
        )
        time.sleep(0.3)  # until it has looked once more
        # What a process does between the last look and its end is missed.
        assert 0.4 <= clock.of_step(run) <= 0.75, "two processes, 0.6 s each, in two steps"
        assert clock.of_step(summarise(**ABOUT, step_times_s=[1.0])) == 0.0


ABOUT = {"variant": "silent", "model": "none", "processes": 1, "batch_per_process": 1, "loss": 0.0}
