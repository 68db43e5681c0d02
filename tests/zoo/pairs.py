"""Models that are trained on several samples at once, or beside another model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_data import CLASSES, COLUMNS, adamw, classes_of, drawn, sgd, table, task

import shoal


def embedder() -> nn.Module:
    """Without a last bias, which does not change how far two are apart."""
    return nn.Sequential(nn.Linear(COLUMNS, 16), nn.ReLU(), nn.Linear(16, 6, bias=False))


def siamese() -> shoal.Task:
    """Calls the model twice: are these two of one kind?"""

    def objective(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        one, other, are_alike = batch
        apart = (model(one) - model(other)).square().sum(1)
        return torch.where(are_alike, apart, F.relu(1 - apart)).mean()

    one, other = table(), drawn(COLUMNS, seed=9)
    return task(embedder, one, other, classes_of(one) == classes_of(other), objective=objective)


def contrastive() -> shoal.Task:
    """All other samples of a batch are wrong answers, so parts of a batch have others than the whole."""

    def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        one, other = F.normalize(model(torch.cat([batch[0], batch[1]])), dim=1).chunk(2)
        return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))

    return task(embedder, table(), table() + 0.1 * drawn(COLUMNS, seed=9), objective=objective, optimizer=adamw)


class Distilled(nn.Module):
    """A small model that learns what a large one, which stays as it is, makes of the same."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(COLUMNS, 32), nn.Tanh(), nn.Linear(32, CLASSES))
        self.teacher.requires_grad_(False)
        self.student = nn.Sequential(nn.Linear(COLUMNS, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(x)


def distilled() -> shoal.Task:
    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        student, teacher = output
        learnt = F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean")
        return learnt + F.cross_entropy(student, target)

    inputs = table()
    return task(Distilled, inputs, classes_of(inputs), loss=loss)


class LowRank(nn.Module):
    """A layer that stays as it is, and two narrow ones beside it that learn."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2.0 * self.up(self.down(x))


def adapted() -> shoal.Task:
    """The optimizer is given what learns, and nothing else."""

    def model() -> nn.Module:
        layers = [LowRank(nn.Linear(COLUMNS, 16)), nn.ReLU(), LowRank(nn.Linear(16, 16)), nn.ReLU()]
        return nn.Sequential(*layers, LowRank(nn.Linear(16, CLASSES)))

    inputs = table()
    return task(
        model,
        inputs,
        classes_of(inputs),
        optimizer=lambda params: sgd([param for param in params if param.requires_grad]),
    )
