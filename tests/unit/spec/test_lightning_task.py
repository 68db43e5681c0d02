"""`Task.from_lightning`: what is understood of a module, and what is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.datasets.given import numbered
from shoal.errors import ShoalError
from shoal.model.replica import call_model

PAIRS = TensorDataset(torch.ones(8, 2), torch.zeros(8, 1))


class Module(nn.Module):
    """Has the shape of a LightningModule; `log` would fail without a trainer of Lightning's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def log(self, name: str, value: Any) -> None:
        raise AssertionError("nobody listens")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.3)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(PAIRS, batch_size=4, shuffle=True)


def test_a_module_says_all_of_it() -> None:
    task = numbered(shoal.Task.from_lightning(Module, epochs=2))  # as whoever trains it does
    assert (task.batch_size, task.shuffle, task.epochs, task.collate) == (4, True, 2, None)
    assert task.train is PAIRS and task.objective is not None
    other, module = task.model(), task.model()
    expected = nn.functional.mse_loss(module.layer(PAIRS[:][0]), PAIRS[:][1])
    assert torch.equal(task.objective(module, PAIRS[:]), expected)
    for one in (module, other):
        optimizer = task.optimizer(list(one.parameters()))
        assert isinstance(optimizer, torch.optim.Adam)
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in one.parameters()]


@pytest.mark.parametrize(
    "configured",
    [
        lambda own: [own],
        lambda own: {"optimizer": own},
        lambda own: ([own], []),
    ],
)
def test_ways_to_say_one_optimizer(configured: Callable[[Any], Any]) -> None:
    class Configured(Module):
        def configure_optimizers(self) -> Any:
            return configured(super().configure_optimizers())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx)}

    task = shoal.Task.from_lightning(Configured, PAIRS, batch_size=8)
    module = task.model()
    assert isinstance(task.optimizer(list(module.parameters())), torch.optim.Adam)
    assert task.objective is not None and task.objective(module, PAIRS[:]).dim() == 0


def scheduled(module: Module) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def several(module: Module) -> Any:
    return [torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"configure_optimizers": scheduled}, "makes a scheduler, too, which Lightning steps after an epoch"),
        ({"configure_optimizers": several}, "must make one optimizer, found 2"),
        ({"configure_optimizers": lambda self: None}, "must make one optimizer, found none"),
        ({"training_step": None}, "Changed has no training_step"),
        ({"automatic_optimization": False}, "optimizes by hand"),
        ({"training_step": lambda self, batch, number: None}, "training_step returned no loss"),
        ({"train_dataloader": None}, "has no train_dataloader; set train="),
    ],
)
def test_what_is_not_understood(changes: dict[str, Any], message: str) -> None:
    changed = type("Changed", (Module,), changes)
    with pytest.raises(ShoalError, match=message):
        task = shoal.Task.from_lightning(changed)
        module = task.model()
        task.optimizer(list(module.parameters()))
        assert task.objective is not None
        task.objective(module, PAIRS[:])


def test_a_scheduler_by_steps_is_the_tasks() -> None:
    changed = type("Changed", (Module,), {"configure_optimizers": scheduled})
    task = shoal.Task.from_lightning(changed, scheduler=lambda own: torch.optim.lr_scheduler.StepLR(own, 3))
    module = task.model()
    assert isinstance(task.optimizer(list(module.parameters())), torch.optim.SGD)


def test_a_module_that_is_made_and_layers_of_others() -> None:
    with pytest.raises(ShoalError, match=r"found one that is made \(Module\); write lambda: Module"):
        shoal.Task.from_lightning(Module(), PAIRS)  # type: ignore[arg-type]
    task = shoal.Task.from_lightning(Module, PAIRS)
    with pytest.raises(ShoalError, match="needed for layers besides"):
        task.optimizer([nn.Parameter(torch.ones(1))])


def test_the_number_of_a_batch_may_be_left_out() -> None:
    changed = type("Changed", (Module,), {"training_step": lambda self, batch: batch[0].sum()})
    task = shoal.Task.from_lightning(changed, PAIRS)
    assert task.objective is not None
    assert task.objective(task.model(), PAIRS[:]) == PAIRS[:][0].sum()


def test_metrics_of_a_module_without_forward_are_refused() -> None:
    class Silent(nn.Module):
        pass

    with pytest.raises(ShoalError, match="need the model's output, but Silent has no forward"):
        call_model(Silent(), torch.zeros(1))
