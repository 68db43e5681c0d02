"""What the models of this folder learn from: small sets, drawn once, whose targets follow from their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

SAMPLES, BATCH, STEPS = 48, 16, 6
COLUMNS, CLASSES = 8, 3
SIDE = 8
VOCABULARY, LENGTH = 24, 6


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(seed))


def table() -> Tensor:
    return drawn(COLUMNS)


def classes_of(inputs: Tensor) -> Tensor:
    """Three of them, as a line through the inputs has it."""
    line = inputs.flatten(1) @ torch.linspace(-1.0, 1.0, inputs[0].numel())
    return (line > line.median()).long() + (line > line.quantile(0.8)).long()


def images() -> Tensor:
    return drawn(1, SIDE, SIDE)


def tokens(length: int = LENGTH, seed: int = 2) -> Tensor:
    """Texts in which each token is the one before it and three more, so that the next can be learnt."""
    first = torch.randint(1, VOCABULARY, (SAMPLES, 1), generator=torch.Generator().manual_seed(seed))
    return 1 + (first + 3 * torch.arange(length)) % (VOCABULARY - 1)


def lengths() -> Tensor:
    """Of texts that are padded."""
    return torch.randint(2, LENGTH + 1, (SAMPLES,), generator=torch.Generator().manual_seed(4))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def task(model: Callable[[], nn.Module], *columns: Any, **fields: Any) -> shoal.Task:
    """A classifier of tensors, unless the fields say something else."""
    usual: dict[str, Any] = {"optimizer": sgd, "batch_size": BATCH, "epochs": 100, "max_steps": STEPS}
    if columns:
        usual["train"] = TensorDataset(*columns)
    if "objective" not in fields:
        usual["loss"] = F.cross_entropy
    return shoal.Task(model=model, **usual | fields)


def per_token(scores: Tensor, wanted: Tensor) -> Tensor:
    """The loss of scores for every token of a text."""
    return F.cross_entropy(scores.flatten(0, 1), wanted.flatten())
