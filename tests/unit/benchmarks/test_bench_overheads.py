"""What the benchmark makes of runs with checkpoints, slow data, callbacks and loggers, and without."""

import io

import pytest
import torch
from rich.console import Console

from benchmarks import overheads, reading, watched
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


def test_readers_are_as_slow_as_a_step_of_this_machine(monkeypatch):
    asked = []

    def samples_per_s(model, steps, spends="", batch_s=0.0):
        asked.append((spends, pytest.approx(batch_s)))
        return 640 * {"": 1.0, "burn": 0.96, "sleep": 0.94}[spends]

    monkeypatch.setattr(reading, "samples_per_s", samples_per_s)
    burns, sleeps = reading.measure_reading(2)
    rounds = [("", 0.0), ("burn", 0.07), ("sleep", 0.15)]
    assert asked == [("", 0.0), *rounds, *rounds[1:], rounds[0]]
    assert burns.ratio == pytest.approx(0.96) and burns.met and not sleeps.met


def test_a_row_that_is_read_slowly_is_the_same_row():
    spent = []
    found = reading.task("digits", 1, "burn", 0.32).train()
    found._spend = spent.append
    plain = reading.task("digits", 1).train()
    assert len(found) == len(plain) and all(map(torch.equal, found[3], plain[3]))
    assert spent == [pytest.approx(0.01)]


def test_what_watching_costs_is_told_in_microseconds(monkeypatch):
    monkeypatch.setattr(watched, "step_seconds", lambda steps, watched: 540e-6 if watched else 500e-6)
    finding = watched.measure_watching(2)
    assert finding.values == (pytest.approx(40), pytest.approx(40)) and finding.met


def test_a_step_is_that_of_a_usual_window(monkeypatch):
    monkeypatch.setattr(watched, "WINDOW", 2)
    seconds = [0, 1, 2, 3, 5, 50, 90, 91, 92]
    assert watched.typical_step_s([(float(at), number) for number, at in enumerate(seconds)]) == 1.25


@pytest.mark.long
def test_watched_runs_train_as_others_do(monkeypatch):
    monkeypatch.setattr(watched, "WINDOW", 10)
    assert all(watched.step_seconds(200, watched=is_watched) > 0 for is_watched in (True, False))
