"""What the benchmark makes of runs with checkpoints and without."""

import io

import pytest
from rich.console import Console

from benchmarks import overheads
from benchmarks.bars import BarClaim
from benchmarks.recorded import Recorded
from benchmarks.table import verdicts_table
from shoal.observe import Event

WRITTEN = {"step": 50, "path": "step-50", "digest": "xxh3:0", "nbytes": 8, "seconds": 0.1}


def run_of(speed: float, stalls: tuple[float, ...] = ()) -> Recorded:
    """A run of a second with this throughput, and checkpoints that held it up for so long each."""
    events = [Event.of("checkpoint", 0, {**WRITTEN, "stall": stall}) for stall in stalls]
    return Recorded([(0.0, 0), (1.0, int(speed))], {}, events)


def test_checkpoints_are_judged_by_the_whole_run(monkeypatch):
    asked = []

    def train(model, steps, checkpoint):
        asked.append(checkpoint)
        return run_of(1000) if checkpoint == "none" else run_of(980, (0.01, 0.03))

    monkeypatch.setattr(overheads, "train", train)
    speed, stall = overheads.measure_checkpoints(2)
    assert asked == ["none", "every=50", "every=50", "none"]
    assert speed.ratio == pytest.approx(0.98) and speed.met
    assert stall.values == (0.01, 0.03, 0.01, 0.03) and stall.value == pytest.approx(0.02)
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(verdicts_table([speed, stall]))
    first, second = console.export_text().splitlines()[-2:]
    assert first.split()[-1] == "met" and "none" in second and "0.02 s" in second and "met" not in second


def test_a_run_that_saves_nothing_shows_nothing(monkeypatch):
    monkeypatch.setattr(overheads, "train", lambda model, steps, checkpoint: run_of(1000))
    (claim,) = overheads.measure_checkpoints(1)
    assert isinstance(claim, BarClaim) and not claim.met


def test_what_is_counted_and_told_is_judged_by_the_median_step(monkeypatch):
    asked = []

    def train(model, steps, checkpoint, quiet):
        asked.append(quiet)
        step_s = 0.100 if quiet else 0.101
        return Recorded([(step * step_s, step) for step in range(9)] + [(60.0, 9)], {}, [])

    monkeypatch.setattr(overheads, "train", train)
    verdict = overheads.measure_books(2)
    assert asked == [False, True, True, False]
    assert verdict.ratio == pytest.approx(0.100 / 0.101) and verdict.met
