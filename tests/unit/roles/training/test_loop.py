"""The loop and turns that stay open: what follows from them, and when."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.comm.channel import Channel
from shoal.roles.process.reporter import Reporter
from shoal.roles.trainer.state import Unwatched
from shoal.roles.training.checkpointing import Checkpointing
from shoal.roles.training.loop import Loop
from shoal.roles.training.observer import Outcome
from shoal.roles.training.training import Training
from shoal.spec import Conduct, Job, Task, World
from shoal.step.work import Work
from shoal.strategies.base import Company, Setting, StepResult
from shoal.strategies.data.single import SingleProcess

STEPS = 12
GAMMA = 0.5
DATA = TensorDataset(torch.randn(STEPS, 2), torch.randn(STEPS, 2))
TASK = Task(
    model=lambda: nn.Linear(2, 2),
    loss=nn.functional.mse_loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=GAMMA),
    train=DATA,
    batch_size=1,
    epochs=1,
)


class Late(SingleProcess):
    """Says what a step came to when it is asked, and notes how many it had not been asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: deque[Later] = deque()
        self.widths: list[int] = []
        self.rates: list[float] = []

    def take(self, work: Work) -> Later:  # type: ignore[override]
        self.rates.append(self._replica.learning_rate)
        later = Later(self, super().take(work))
        self.pending.append(later)
        self.widths.append(len(self.pending))
        return later

    def exchange(self, *call: Any) -> torch.Tensor:
        assert not self.pending
        return super().exchange(*call)


@dataclass(eq=False)
class Later:
    strategy: Late
    known: StepResult
    is_known: bool = False

    def result(self) -> StepResult:
        assert self.strategy.pending.popleft() is self
        return self.known


class Watcher(Unwatched):
    def __init__(self, stops_at: int | None = None) -> None:
        self.asked = 0
        self.steps: list[int] = []
        self.rates: list[float] = []
        self.evaluated: list[int] = []
        self.followed: list[int] = []
        """Steps that the next one is told right after."""
        self._stops_at = stops_at

    def wants_stop(self) -> bool:
        self.asked += 1
        return self._stops_at is not None and self.asked >= self._stops_at

    def on_step(self, step: int, result: StepResult, *told: Any, **besides: Any) -> None:
        self.followed += [step] if besides["more"] else []
        self.steps.append(step)
        self.rates.append(told[1])

    def on_evaluation(
        self, step: int, results: dict[str, float], by_client: dict[str, list[Any]] | None = None
    ) -> None:
        self.evaluated.append(step)


class Torn(SingleProcess):
    """Ends after its third step, which others had not come to."""

    def take(self, work: Work) -> StepResult:
        is_last = work.turn.step == 3
        return replace(super().take(work), stop=is_last, reason="stopped", is_whole=not is_last)


class Rounds(Late):
    """When the fourth is taken, what all that are open came to is known."""

    def take(self, work: Work) -> Later:  # type: ignore[override]
        later = super().take(work)
        if len(self.pending) == 4:
            for open_ in self.pending:
                open_.is_known = True
        return later


def run(
    task: Task, watcher: Watcher, most_open: int, strategy: Late | None = None
) -> tuple[Outcome, Late, Training]:
    strategy, conduct = strategy or Late(), Conduct(fills=(range(1),), open_commits=most_open)
    training = Training(task, strategy, World(), conduct)
    setting = Setting(world=World(), conduct=conduct, extent=training.extent)
    strategy.open(training.replica, setting)
    return Loop(training, setting, watcher).run(), strategy, training


def test_turns_are_entered_in_order_and_at_most_so_many_are_open() -> None:
    watcher = Watcher()
    outcome, strategy, training = run(TASK, watcher, 4)
    assert watcher.steps == list(range(1, STEPS + 1)) and outcome.reason == "finished"
    assert strategy.widths == [1, 2, 3, *[4] * (STEPS - 3)] and not strategy.pending
    expected = [GAMMA**step for step in range(STEPS)]
    assert strategy.rates == watcher.rates == expected, "each step has the learning rate that it would have had"
    assert training.replica.learning_rate == GAMMA**STEPS


def test_who_watches_knows_which_steps_are_told_together() -> None:
    watcher = Watcher()
    run(TASK, watcher, 4, Rounds())
    assert watcher.steps == list(range(1, STEPS + 1))
    assert watcher.followed == [1, 2, 3, 5, 6, 7, 9, 10, 11]
    run(TASK, late := Watcher(), 4)
    assert not late.followed


def test_a_scheduler_that_needs_the_loss_waits_for_it() -> None:
    task = replace(TASK, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    assert run(task, Watcher(), 4)[1].widths == [1] * STEPS


def test_nothing_is_open_where_the_model_is_evaluated() -> None:
    watcher = Watcher()
    run(replace(TASK, test=DATA, evaluate_every=5), watcher, 4)
    assert watcher.evaluated == [5, 10, 12]


@pytest.mark.parametrize(("most_open", "last"), [(1, 6), (2, 7), (4, 9)])
def test_who_stops_has_taken_what_everybody_has_taken(most_open: int, last: int) -> None:
    """The wish is known when its step is; by then others have begun later ones, and count on this process."""
    watcher = Watcher(stops_at=6)
    outcome, strategy, _ = run(TASK, watcher, most_open)
    assert (outcome.step, outcome.reason) == (last, "stopped")
    assert watcher.steps == list(range(1, last + 1)) and not strategy.pending


def test_what_is_good_enough_ends_the_run() -> None:
    hopeless = shoal.Plateau(patience=1, min_delta=1e9)
    task = replace(TASK, test=DATA, evaluate_every=3, stop=hopeless)
    outcome, _, _ = run(task, Watcher(), 4)
    assert (outcome.step, outcome.reason) == (6, "plateau")


@pytest.mark.parametrize(("saved", "warnings"), [(0, 1), (2, 1), (3, 0)])
def test_an_end_that_cannot_be_saved_is_told(tmp_path: Path, saved: int, warnings: int) -> None:
    strategy, conduct, told = Torn(), Conduct(fills=(range(1),)), list[str]()
    training = Training(TASK, strategy, World(), conduct)
    job = Job(target="toy.py", checkpoint="every=100", run_dir=str(tmp_path))
    reporter = Reporter(World(), Channel.pair()[1])
    training.checkpoints = Checkpointing(job, training.replica, training.schedule, reporter)
    training.checkpoints.note_saved(saved)
    setting = Setting(world=World(), conduct=conduct, extent=training.extent, company=Company(warn=told.append))
    strategy.open(training.replica, setting)
    assert Loop(training, setting, Watcher()).run().step == 3
    assert len(told) == warnings
    if told:
        assert f"step 3 is not saved; --resume goes on after step {saved}" in told[0]
