"""TensorBoard's own reader finds the scalars."""

import subprocess
import sys

import pytest

from shoal.errors import SpecError
from shoal.observe import Event, TensorBoardSink


def test_scalars_are_read_back(tmp_path, run_events):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path / "tensorboard")
    for event in run_events:
        sink.handle(event)
    sink.close()
    found = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert sorted(found.Tags()["scalars"]) == ["test/accuracy", "test/loss", "train/loss", "train/lr"]
    losses = found.Scalars("train/loss")
    assert [scalar.step for scalar in losses] == list(range(1, 201))
    expected = [event.values["steps"][0][1] for event in run_events if event.kind == "steps"]
    assert [scalar.value for scalar in losses] == pytest.approx(expected, rel=1e-6)
    assert [scalar.step for scalar in found.Scalars("test/accuracy")] == [50, 100, 150, 200]


def test_steps_that_were_undone_are_left_out(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for number in (1, 2, 3, 4):
        sink.handle(Event.of("steps", 0, {"steps": [[number, 9.0]], "samples": number, "lr": 0.1}))
    sink.handle(
        Event.of("restarted", None, {"step": 2, "samples": 2, "undone": 2, "seconds": 0.1, "reason": "died"})
    )
    sink.handle(Event.of("steps", 0, {"steps": [[3, 5.0]], "samples": 3, "lr": 0.1}))
    sink.close()
    found = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    assert [(one.step, one.value) for one in found.Scalars("train/loss")] == [(1, 9.0), (2, 9.0), (3, 5.0)]


def test_missing_tensorboard_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SpecError, match=r"pip install shoal\[tensorboard\]"):
        TensorBoardSink(tmp_path)


def test_observing_imports_neither_torch_nor_matplotlib():
    code = "import sys, shoal.observe; print([name for name in ('torch', 'matplotlib') if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"
