"""Tasks with one oddity each: of their batches, layers, sizes or ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

GENERATOR = torch.Generator().manual_seed(8)
INPUTS = torch.randn(48, 6, generator=GENERATOR)
TARGETS = torch.randint(0, 3, (48,), generator=GENERATOR)
PAIRS = TensorDataset(INPUTS, TARGETS)


def make(model: Any = lambda: nn.Linear(6, 3), **fields: Any) -> shoal.Task:
    loss = {} if "objective" in fields else {"loss": F.cross_entropy}
    defaults = {
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "train": PAIRS,
        "batch_size": 16,
        "epochs": 3,
    }
    return shoal.Task(model=model, **{**loss, **defaults, **fields})


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.left(left) - self.right(right).tanh()


def named_inputs() -> shoal.Task:
    return make(TwoInputs, train=[({"left": x, "right": -x}, int(y)) for x, y in PAIRS])


def several_inputs() -> shoal.Task:
    return make(TwoInputs, train=[((x, -x), int(y)) for x, y in PAIRS])


def own_objective() -> shoal.Task:
    return make(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)),
        objective=lambda model, batch: model(batch[0]).logsumexp(1).mean(),
        train=TensorDataset(INPUTS),
    )


def lazy() -> shoal.Task:
    layers = lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Dropout(0.1), nn.LazyLinear(3))  # noqa: E731
    return make(layers)


def lazy_objective() -> shoal.Task:
    return make(
        lambda: nn.LazyLinear(3),
        objective=lambda model, batch: model(batch["x"]).logsumexp(1).mean(),
        train=[{"x": x} for x in INPUTS],
    )


def sparse() -> shoal.Task:
    tokens = torch.randint(0, 30, (48, 5), generator=torch.Generator().manual_seed(2))
    return make(
        lambda: nn.Sequential(nn.EmbeddingBag(30, 4, sparse=True), nn.Linear(4, 3)),
        train=TensorDataset(tokens, TARGETS),
        clip_norm=0.5,
    )


def small_last_batch() -> shoal.Task:
    """The last batch of an epoch is one sample: on several workers most have nothing to do."""
    layers = lambda: nn.Sequential(nn.Linear(6, 5), nn.InstanceNorm1d(5, track_running_stats=True), Rows())  # noqa: E731
    return make(layers, train=TensorDataset(INPUTS[:33].view(33, 1, 6).repeat(1, 5, 1), TARGETS[:33]))


class Rows(nn.Module):
    """Counts its batches, as BatchNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(25, 3)
        self.register_buffer("batches", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.batches += 1
        return self.last(x.flatten(1))


def narrow() -> shoal.Task:
    """The largest chunk is of bfloat16 and has a size that no whole float32 fills."""

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(133, dtype=torch.bfloat16))
            self.last = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :3] * self.scale[:3] + self.last.bias

    return make(Narrow, optimizer=lambda params: torch.optim.SGD(params, lr=0.01))


def padding_alone() -> shoal.Task:
    """The first half of every batch is nothing but padding: it has no mean, and counts nothing."""
    targets = TARGETS.clone()
    targets[torch.arange(48) % 16 < 8] = -100
    data = TensorDataset(INPUTS, targets)
    return make(train=data, test=data, shuffle=False, weight=lambda batch: float((batch[1] != -100).sum()))


def plateau() -> shoal.Task:
    return make(
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        test=PAIRS,
        stop=shoal.Plateau(patience=2, min_delta=0.0),
        epochs=50,
    )


def lower_rate_on_plateau() -> shoal.Task:
    return make(
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
    )


def per_worker() -> shoal.Task:
    return make(batch_size=8, batch_per_worker=True)


def evaluated_often() -> shoal.Task:
    return make(test=PAIRS, evaluate_every=2, metrics={"accuracy": shoal.metrics.accuracy})


def limited() -> shoal.Task:
    return replace(evaluated_often(), max_steps=5)
