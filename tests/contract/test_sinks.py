"""One suite for everyone who reads events: whatever a run tells is taken, from any beginning, and to any end."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from helpers.logged import sink_of
from helpers.training import Train
from shoal.launch.owner import ZygoteProcess
from shoal.observe import Event, JsonlSink, PlainSink, ProgressSink, RunFolder, Sink
from shoal.observe.jsonl import FILE_NAME
from shoal.observe.loggers.csv_files import CsvLogger
from shoal.observe.loggers.tensorboard import TensorBoardLogger

TASKS = Path(__file__).parents[1] / "equivalence" / "small_tasks.py"
MakeSink = Callable[[Path], Sink]
SINKS: dict[str, MakeSink] = {
    "bar": lambda folder: ProgressSink(Console(file=io.StringIO(), force_terminal=True)),
    "lines": lambda folder: PlainSink(io.StringIO()),
    "file": JsonlSink,
    "CSV": lambda folder: sink_of("csv", CsvLogger(), RunFolder(folder)),
    "TensorBoard": lambda folder: sink_of("tensorboard", TensorBoardLogger(), RunFolder(folder)),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, zygote: ZygoteProcess) -> list[Event]:
    """What a run tells in which a worker dies, the model is evaluated, and the state is saved."""
    train = Train(TASKS, tmp_path_factory.mktemp("told"), zygote)
    run = train("mlp", workers=2, spares=1, steps=30, checkpoint="every=10", chaos="kill worker:1 at step 8")
    assert len({event.kind for event in run.events}) > 6
    return run.events


@pytest.fixture(params=SINKS)
def make(request: pytest.FixtureRequest) -> MakeSink:
    return SINKS[request.param]


def test_a_whole_run_is_taken(make: MakeSink, told: list[Event], tmp_path: Path) -> None:
    sink = make(tmp_path)
    for event in told:
        sink.handle(event)
    sink.close()


@pytest.mark.parametrize("part", [0, 1, 7])
def test_it_may_be_over_at_any_time(make: MakeSink, told: list[Event], tmp_path: Path, part: int) -> None:
    sink = make(tmp_path)
    for event in told[:part]:
        sink.handle(event)
    sink.close()


def test_it_may_come_late(make: MakeSink, told: list[Event], tmp_path: Path) -> None:
    """Without the beginning, as where a reader follows a run that goes on."""
    sink = make(tmp_path)
    for event in told[len(told) // 2 :]:
        sink.handle(event)
    sink.close()


def test_what_was_told_twice_does_no_harm(make: MakeSink, told: list[Event], tmp_path: Path) -> None:
    sink = make(tmp_path)
    for event in (*told[:20], *told[:20]):
        sink.handle(event)
    sink.close()


def test_files_are_whole_when_it_is_closed(told: list[Event], tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    for event in told:
        sink.handle(event)
    sink.close()
    lines = (tmp_path / FILE_NAME).read_text(encoding="utf-8").splitlines()
    kinds = [Event.from_json(line).kind for line in lines]
    assert kinds.count("evaluation") == sum(event.kind == "evaluation" for event in told) > 0
    assert kinds[-1] != "beat" and "beat" not in kinds, "signs of life are shown, never kept"
