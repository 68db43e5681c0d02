"""TensorBoard's own reader finds the scalars."""

import random
import subprocess
import sys

import pytest

from helpers.logged import read_tensorboard, sink_of
from shoal.observe import Event, RunFolder
from shoal.observe.loggers.record_file import RecordFile
from shoal.observe.loggers.tensorboard import TensorBoardLogger


def log(folder, events):
    """What TensorBoard finds after these events."""
    sink = sink_of("tensorboard", TensorBoardLogger(), RunFolder(folder))
    for event in events:
        sink.handle(event)
    sink.close()
    return read_tensorboard(folder / "logged" / "tensorboard").scalars


def test_scalars_are_read_back(tmp_path, run_events):
    found = log(tmp_path, run_events)
    assert sorted(found) == ["test/accuracy", "test/loss", "train/loss", "train/lr"]
    assert [step for step, _ in found["train/loss"]] == list(range(1, 201))
    expected = [event.values["steps"][0][1] for event in run_events if event.kind == "steps"]
    assert [value for _, value in found["train/loss"]] == pytest.approx(expected, rel=1e-6)
    assert [step for step, _ in found["test/accuracy"]] == [50, 100, 150, 200]


@pytest.mark.parametrize("count", [1, 200])
def test_records_have_the_checksums_of_the_package(tmp_path, count):
    from tensorboard.summary.writer.record_writer import RecordWriter

    records = [random.Random(number).randbytes(4 + number) for number in range(count)]
    with (tmp_path / "theirs").open("wb") as file:
        writer = RecordWriter(file)
        for record in records:
            writer.write(record)
        writer.flush()
    ours = RecordFile(tmp_path / "ours")
    ours.write(records)
    ours.close()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_steps_that_were_undone_are_left_out(tmp_path):
    steps = [
        Event.of("steps", 0, {"steps": [[number, 9.0]], "samples": number, "lr": 0.1}) for number in (1, 2, 3, 4)
    ]
    undone = {"step": 2, "samples": 2, "undone": 2, "seconds": 0.1, "reason": "died"}
    again = Event.of("steps", 0, {"steps": [[3, 5.0]], "samples": 3, "lr": 0.1})
    found = log(tmp_path, [*steps, Event.of("restarted", None, undone), again])
    assert found["train/loss"] == [(1, 9.0), (2, 9.0), (3, 5.0)]


def test_torch_is_not_needed_for_it(tmp_path):
    code = f"""
import sys
from pathlib import Path
from shoal.observe.loggers import LoggedRun, Scalar, find_loggers
logger = find_loggers(["tensorboard"])["tensorboard"]
logger.begin(LoggedRun(name="mine", folder=Path({str(tmp_path)!r}), settings={{}}))
logger.log([Scalar(1, "train/loss", 0.5, 0.0)])
print("torch" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "False"


def test_observing_imports_neither_torch_nor_matplotlib():
    code = "import sys, shoal.observe; print([name for name in ('torch', 'matplotlib') if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"
