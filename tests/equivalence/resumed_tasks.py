"""A small task with everything that a resumed run must go on with."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

STEPS = 20
"""Two epochs of 9 steps, and a little more."""

SCHEDULERS = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS),
    # It follows the loss of every step.
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=1),
}


class Counting(torch.optim.SGD):
    """Keeps a number that is no tensor."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["count"] = 1
        return super().step(closure)


class Slowing(torch.optim.SGD):
    """Changes a setting of its groups at each step."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["pace"] = group.get("pace", 1.0) * 0.9
        return super().step(closure)


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": torch.optim.LBFGS,
    "Counting": Counting,
    "Slowing": Slowing,
}


def _classified(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 5, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 16, generator=generator) + target[:, None], target)


def everything(
    scheduler: str = "cosine",
    patience: int = 0,
    samples: int = 208,
    steps: int = STEPS,
    dropout: float = 0.2,
    optimizer: str = "AdamW",
    batchnorm: bool = True,
    clip: float = 0.5,
    skip: float | None = None,
) -> shoal.Task:
    """Dropout, clipping, a schedule, two numbers of state for every weight, moving buffers, early stopping."""
    return shoal.Task(
        model=lambda: nn.Sequential(
            nn.Linear(16, 40, bias=not batchnorm),  # behind it a bias would be lost again
            nn.BatchNorm1d(40) if batchnorm else nn.Identity(),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(40, 5),
        ),
        loss=F.cross_entropy,
        optimizer=lambda params: OPTIMIZERS[optimizer](params, lr=0.01),
        train=_classified(samples, 1),  # the last batch of an epoch is a small one
        test=_classified(50, 2),
        metrics={"accuracy": shoal.metrics.accuracy},
        batch_size=24,
        epochs=100,
        max_steps=steps,
        clip_norm=clip or None,
        skip_loss_below=skip,
        scheduler=SCHEDULERS[scheduler],
        evaluate_every=4,
        stop=shoal.Plateau(patience=patience, min_delta=1e9) if patience else None,
    )
