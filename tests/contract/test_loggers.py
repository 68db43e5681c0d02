"""One suite for all loggers: what a run tells arrives, and is found by each one's own reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.logged import Found, png, read_csv, read_mlflow, read_tensorboard, read_wandb, sink_of
from shoal.observe import Event, RunFolder
from shoal.observe.happenings import (
    Evaluated,
    Finished,
    ImageLogged,
    Lost,
    Replaced,
    Resumed,
    Saved,
    ScalarsLogged,
    StepsTaken,
    Stopped,
    TextLogged,
)
from shoal.observe.loggers import find_loggers

SETTINGS = {"target": "digits.py:task", "args.width": 8, "cluster.workers": 2, "strategy": "data"}
DIGEST = "xxh3:0123456789abcdef"
LOSSES = {step: 1 / (1 + step) for step in range(1, 7)}


@dataclass(frozen=True)
class Kept:
    """A logger by its written form, and how to read what it keeps."""

    written: str
    read: Callable[[Path], Found]
    forgets: bool
    """Whether steps that were undone are not found any more."""

    def tell(self, folder: RunFolder, *events: Event) -> None:
        """Log these, as a process does that begins a run or resumes it."""
        ((name, logger),) = find_loggers([self.written]).items()
        sink = sink_of(name, logger, folder, dict(SETTINGS))
        for event in events:
            sink.handle(event)
        sink.close()

    def found(self, folder: RunFolder) -> Found:
        return self.read(folder.logged / self.written.partition(":")[0])


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One for all tests: MLflow takes seconds to make one."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def kept(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    match request.param:
        case "csv":
            yield Kept("csv", read_csv, forgets=True)
        case "tensorboard":
            yield Kept("tensorboard", read_tensorboard, forgets=True)
        case "wandb":
            wandb = pytest.importorskip("wandb")
            monkeypatch.delenv("WANDB_MODE", raising=False)
            monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
            for kind in ("CACHE", "CONFIG", "DATA"):
                monkeypatch.setenv(f"WANDB_{kind}_DIR", str(tmp_path / kind))
            yield Kept("wandb", read_wandb, forgets=False)
            wandb.teardown()
        case "mlflow":
            pytest.importorskip("mlflow")
            monkeypatch.chdir(tmp_path)
            monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
            monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", request.node.name)
            uri = request.getfixturevalue("database")
            yield Kept(f"mlflow:{uri}", lambda folder: read_mlflow(folder, uri), forgets=False)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Of a run that has left its model, its chart, and a picture that a callback drew."""
    folder = RunFolder(tmp_path / "mine")
    (folder.path / "images").mkdir(parents=True)
    folder.model.write_bytes(b"weights")
    folder.chart.write_bytes(png(10))
    (folder.path / "images" / "sample.png").write_bytes(png(20))
    return folder


def steps(*numbers: int, scale: float = 1.0) -> Event:
    told = [[number, scale * LOSSES[number]] for number in numbers]
    parts = [[number, {"ce": float(number)}] for number in numbers]
    return Event(StepsTaken(steps=told, parts=parts, samples=numbers[-1], total_steps=6, lr=0.5, epoch=1), 0)


ALL = ("csv", "tensorboard", "wandb", "mlflow")
SLOW_TWICE = [pytest.param(one, marks=pytest.mark.long) if one in ("wandb", "mlflow") else one for one in ALL]


@pytest.mark.parametrize("kept", ALL, indirect=True)
def test_a_run_is_found_as_it_was_told(kept: Kept, folder: RunFolder) -> None:
    kept.tell(
        folder,
        steps(1),
        steps(2, 3),
        Event(Evaluated(step=3, results={"loss": 0.75, "accuracy": 0.5})),
        Event(Lost(rank=1, reason="it was killed")),
        Event(Replaced(rank=1, seconds=0.5)),
        Event(ScalarsLogged(scalars=[[3, "temperature", 36.6]])),
        Event(TextLogged(name="remark", text="all is well", step=3)),
        Event(ImageLogged(name="sample", path="images/sample.png", step=3)),
        steps(4, 5, 6),
        Event(Evaluated(step=6, results={"loss": 0.25, "accuracy": 1.0})),
        Event(Saved(path=str(folder.model), digest=DIGEST)),
        Event(Finished()),
    )
    found = kept.found(folder)
    assert found.name == "mine" and len(found.runs) == 1
    assert {name: found.settings[name] for name in SETTINGS} == {name: str(one) for name, one in SETTINGS.items()}
    expected = {
        "train/loss": list(LOSSES.items()),
        "train/ce": [(step, float(step)) for step in LOSSES],
        "train/lr": [(1, 0.5), (3, 0.5), (6, 0.5)],
        "test/loss": [(3, 0.75), (6, 0.25)],
        "test/accuracy": [(3, 0.5), (6, 1.0)],
        "temperature": [(3, 36.6)],
    }
    assert set(found.scalars) == set(expected)
    for name, curve in expected.items():
        assert [step for step, _ in found.scalars[name]] == [step for step, _ in curve]
        values = [value for _, value in found.scalars[name]]
        assert values == pytest.approx([value for _, value in curve], rel=1e-6)  # TensorBoard's are float32
    faults = " ".join(found.notes["faults"])
    assert "worker 1 was lost: it was killed" in faults and "worker 1 was replaced in 0.50 s" in faults
    assert found.notes["remark"] == ["all is well"]
    assert found.pictures == {"loss": png(10), "sample": png(20)}
    assert (found.model, found.digest) == (b"weights", DIGEST)


@pytest.mark.parametrize("kept", SLOW_TWICE, indirect=True)
def test_a_resumed_run_goes_on_in_the_same_record(kept: Kept, folder: RunFolder) -> None:
    kept.tell(folder, steps(1, 2, 3, 4, scale=2.0), Event(Stopped(reason="interrupted")))
    kept.tell(folder, Event(Resumed(step=2)), steps(3, 4, 5), steps(6), Event(Finished()))
    found = kept.found(folder)
    assert found.name == "mine" and len(found.runs) == 1
    again = {step: (2 if step <= 2 else 1) * loss for step, loss in LOSSES.items()}
    curve = found.scalars["train/loss"]
    assert dict(curve) == pytest.approx(again), "what was told last"
    assert len(curve) == (6 if kept.forgets else 8)
