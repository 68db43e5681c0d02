"""The benchmark's distributed variants, with real processes."""

import pytest

from benchmarks.compare import compare
from benchmarks.shoal_variant import parse, train
from shoal.launch.owner import ZYGOTE_VARIABLE

STEPS, BATCH = 24, 64


@pytest.mark.long
def test_ddp_trains_in_two_processes_and_reports_once():
    reported = []
    (row,) = compare("digits", ["ddp"], rounds=1, processes=2, steps=5, on_measured=reported.append)
    assert reported == list(row.rounds)
    assert (row.variant, row.processes, len(row.rounds)) == ("ddp", 2, 1)
    assert row.step_s > 0 and 0 < row.loss < 3


@pytest.mark.parametrize(
    "strategy", ["ps:sync=asp", *(pytest.param(name, marks=pytest.mark.long) for name in ("ps:sync=ssp:3", "ps"))]
)
def test_a_timeline_counts_the_samples_of_all_workers(strategy, zygote, monkeypatch):
    monkeypatch.setenv(ZYGOTE_VARIABLE, zygote.name)  # nothing here depends on how long a start takes
    timeline, loss = train(parse([strategy, "digits", "--straggler", "lasting"]), STEPS)
    times, samples = zip(*timeline, strict=True)
    assert list(times) == sorted(times) and list(samples) == sorted(samples)
    # What the first worker has heard of is never ahead of the truth, and behind by a few steps at most.
    assert (STEPS - 5) * BATCH <= samples[-1] <= STEPS * BATCH
    assert len(timeline) > STEPS / 2 and 0 < loss < 3
