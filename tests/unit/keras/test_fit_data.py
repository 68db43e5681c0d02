"""What `fit` was given, as a task that trains an epoch of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

import shoal.keras  # noqa: F401
from shoal.errors import TaskError
from shoal.keras.fit_data import FitData
from shoal.spec import Task

X, Y = torch.arange(20.0).view(10, 2), torch.arange(10)


def task_of(x: Any, y: Any = None, **settings: Any) -> Task:
    return FitData.of(x, y, settings.pop("batch_size", None), **settings).task(
        0, 2, model=lambda: nn.Linear(2, 1), loss=nn.functional.mse_loss, optimizer=torch.optim.SGD
    )


@pytest.mark.parametrize("shuffles", [False, True])
def test_a_loader_says_in_which_order_and_how_batches_are_made(shuffles):
    def doubled(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        return 2 * x, y

    loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=shuffles, drop_last=True, collate_fn=doubled)
    assert FitData.of(loader, None, None).steps == 2
    task = task_of(loader)
    assert (task.shuffle, task.drop_last, task.batch_size, task.epochs) == (shuffles, True, 4, 3)
    assert task.collate is not None
    inputs, target = task.collate([task.train[1], task.train[0]])
    assert torch.equal(inputs, 2 * X[[1, 0]]) and target.tolist() == [1, 0]


def test_arrays_are_shuffled_as_fit_says():
    assert task_of(X.numpy(), Y.numpy()).shuffle
    assert not task_of(X.numpy(), Y.numpy(), shuffle=False).shuffle
    cut = task_of(X.numpy(), Y.numpy(), batch_size=4, steps_per_epoch=5)
    assert (cut.max_steps, cut.epochs) == (5, 2)


def test_what_has_no_numbers_is_refused():
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(TaskError, match="hands out samples by their numbers"):
        task_of(DataLoader(Endless(), batch_size=2))
