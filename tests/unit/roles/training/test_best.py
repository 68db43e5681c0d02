"""Which model a process considers the best, and when it is the one to keep it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.checkpoint.best_files import BestFiles
from shoal.comm.channel import Channel
from shoal.observe import RunFolder
from shoal.roles.process.reporter import Reporter
from shoal.roles.training.best import BestKeeper
from shoal.roles.training.training import Training
from shoal.spec import Conduct, Task, World
from shoal.strategies.data.single import SingleProcess

DATA = TensorDataset(torch.randn(8, 2), torch.randn(8, 2))
SECOND = World(global_rank=1, world_size=2)
TASK = Task(
    model=lambda: nn.Linear(2, 2),
    loss=nn.functional.mse_loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
    train=DATA,
    test=DATA,
    batch_size=4,
    keep_best="-loss",
)


def keeper_in(
    folder: Path, world: World, conduct: Conduct | None = None
) -> tuple[BestKeeper, Training, BestFiles]:
    """One of two workers, and what lies in the folder of their run."""
    training = Training(TASK, SingleProcess(), world, conduct or Conduct(fills=(range(1), range(1, 2))))
    _listens, speaks = Channel.pair()
    run = RunFolder(folder)
    return BestKeeper(training, run, Reporter(world, speaks)), training, BestFiles(run)


def test_the_first_worker_keeps_what_is_better_than_all_before(tmp_path: Path) -> None:
    keeper, _, files = keeper_in(tmp_path, World(world_size=2))
    for step, loss in ((2, 0.5), (4, 0.7), (6, float("nan")), (8, 0.4)):
        keeper.consider(step, {"loss": loss})
        newest = files.newest()
        assert newest is not None and newest.step == (2 if step < 8 else 8)


def test_who_becomes_the_first_keeps_what_a_dead_one_had_no_time_for(tmp_path: Path) -> None:
    keeper, training, files = keeper_in(tmp_path, SECOND)
    keeper.consider(4, {"loss": 0.5})
    assert files.newest() is None, "that is for the first one"
    training.world = SECOND.hosting((0, 1), generation=1)
    keeper.take_over(5, is_still=True)
    assert files.newest() is None, "by now the model is another"
    keeper.take_over(4, is_still=True)
    newest = files.newest()
    assert newest is not None and (newest.step, newest.results) == (4, {"loss": 0.5})


def test_where_all_are_in_later_steps_what_was_not_kept_is_best_no_more(tmp_path: Path) -> None:
    keeper, training, files = keeper_in(tmp_path, SECOND)
    keeper.consider(4, {"loss": 0.5})
    training.world = SECOND.hosting((0, 1), generation=1)
    keeper.take_over(4, is_still=False)
    assert files.newest() is None
    keeper.consider(8, {"loss": 0.7})
    newest = files.newest()
    assert newest is not None and newest.step == 8


@pytest.mark.parametrize("dies_before_it_shows", [False, True])
def test_what_a_dead_one_had_kept_is_told_by_its_successor(tmp_path: Path, dies_before_it_shows: bool) -> None:
    """It evaluates again, for all, and finds what was kept as good as what it found."""
    conduct = Conduct(fills=(range(1), range(1, 2)), servers=1)
    first, _, _ = keeper_in(tmp_path, World(world_size=2), conduct)
    first.consider(4, {"loss": 0.5})
    if dies_before_it_shows:
        RunFolder(tmp_path).best_model.unlink()
    told: list[int] = []
    second, training, files = keeper_in(tmp_path, World(world_size=2), conduct)
    training.callbacks = SimpleNamespace(best_is_kept=lambda step, path: told.append(step))  # type: ignore[assignment]
    second.consider(4, {"loss": 0.5})
    second.consider(6, {"loss": 0.6})
    assert told == [4] and files.has(4) and not files.has(6) and files.shown.is_file()
