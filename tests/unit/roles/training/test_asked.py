"""What callbacks ask for, the loop does: an evaluation, a checkpoint, the end; and tells them of all of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.comm.channel import Channel
from shoal.observe.checkpoint_names import step_folders
from shoal.observe.told_marks import ToldMarks
from shoal.roles.callbacks.opening import callbacks_of
from shoal.roles.process.reporter import Reporter
from shoal.roles.trainer.state import Unwatched
from shoal.roles.training.checkpointing import Checkpointing
from shoal.roles.training.loop import Loop
from shoal.roles.training.observer import Outcome
from shoal.roles.training.training import Training
from shoal.spec import Callback, CallbackContext, Conduct, Job, Task, World
from shoal.step.work import Work
from shoal.strategies.base import Commit, Setting, StepResult
from shoal.strategies.data.single import SingleProcess

STEPS = 12
DATA = TensorDataset(torch.randn(STEPS, 2), torch.randn(STEPS, 2))
TASK = Task(
    model=lambda: nn.Linear(2, 2),
    loss=nn.functional.mse_loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    train=DATA,
    test=DATA,
    batch_size=1,
    evaluate_every=5,
)


class LateProcess(SingleProcess):
    """Its steps are known when somebody asks."""

    def take(self, work: Work) -> Later:
        return Later(super().take(work))


@dataclass(frozen=True)
class Later:
    commit: Commit
    is_known = False

    def result(self) -> StepResult:
        return self.commit.result()


class Asks(Callback):
    """Asks for things after a step, and notes what it hears."""

    def __init__(self, *wishes: str, at: int = 3) -> None:
        self.wishes, self.at = wishes, at
        self.steps: list[int] = []
        self.rates: list[float] = []
        self.evaluated: list[int] = []
        self.saved: list[str] = []
        self.reason = ""

    def on_step(self, context: CallbackContext) -> None:
        self.steps.append(context.step)
        self.rates.append(context.lr)
        for wish in self.wishes if context.step == self.at else ():
            getattr(context, wish)()

    def on_evaluation(self, context: CallbackContext) -> None:
        assert "loss" in context.results
        self.evaluated.append(context.step)

    def on_checkpoint(self, context: CallbackContext, path: Path) -> None:
        assert path.is_dir()
        self.saved.append(path.name)

    def on_end(self, context: CallbackContext, reason: str) -> None:
        self.reason = reason


def run(folder: Path, *callbacks: Callback, most_open: int = 1, **changes: Any) -> Outcome:
    """A run of one process, told of as a worker's is."""
    strategy, conduct = LateProcess(), Conduct(fills=(range(1),), open_commits=most_open)
    training = Training(replace(TASK, callbacks=callbacks, **changes), strategy, World(), conduct)
    job = Job(target="toy.py", checkpoint="every=100", run_dir=str(folder))
    _listens, speaks = Channel.pair()
    reporter = Reporter(World(), speaks)
    training.checkpoints = Checkpointing(job, training.replica, training.schedule, reporter)
    training.callbacks = training.checkpoints.callbacks = callbacks_of(job, training, reporter)
    assert training.callbacks is not None
    setting = Setting(world=World(), conduct=conduct, extent=training.extent)
    strategy.open(training.replica, setting)
    outcome = Loop(training, setting, Unwatched()).run()
    training.checkpoints.close()
    training.callbacks.end(outcome.reason)
    return outcome


def test_all_is_told(tmp_path: Path) -> None:
    heard = Asks()
    run(tmp_path, heard)
    assert heard.steps == list(range(1, STEPS + 1)) and heard.evaluated == [5, 10, 12]
    assert heard.rates == [0.5**step for step in range(STEPS)]
    assert heard.saved == [f"step-{STEPS:09d}"] and heard.reason == "finished"


@pytest.mark.parametrize(("most_open", "last"), [(1, 4), (3, 8)])
def test_it_stops(tmp_path: Path, most_open: int, last: int) -> None:
    """With several open, a step is told of when others were taken already, and so is the wish known."""
    heard = Asks("stop")
    outcome = run(tmp_path, heard, most_open=most_open)
    assert (outcome.step, outcome.reason, heard.reason) == (last, "stopped", "stopped")
    assert heard.steps == list(range(1, last + 1))


@pytest.mark.parametrize(("most_open", "at"), [(1, 4), (3, 8)])
def test_it_evaluates(tmp_path: Path, most_open: int, at: int) -> None:
    heard = Asks("evaluate")
    run(tmp_path, heard, most_open=most_open)
    assert heard.evaluated == sorted({at, 5, 10, 12})
    assert ToldMarks.open(tmp_path / "callbacks.marks").asked == [at]


def test_it_saves(tmp_path: Path) -> None:
    heard = Asks("save")
    run(tmp_path, heard)
    assert heard.saved == ["step-000000004", f"step-{STEPS:09d}"]
    assert [path.name for path in step_folders(tmp_path / "checkpoints")] == heard.saved


def test_without_a_test_set_there_is_nothing_to_evaluate(tmp_path: Path) -> None:
    heard = Asks("evaluate")
    run(tmp_path, heard, test=None)
    assert heard.evaluated == [] and len(heard.steps) == STEPS
