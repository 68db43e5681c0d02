"""A task whose callback writes down what it hears, a line for each call, in the run's folder."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal
from shoal.spec import Mishap

DIARY = "diary.txt"
OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, momentum=0.9),
    "ASGD": partial(torch.optim.ASGD, t0=5),
    "AdamW": torch.optim.AdamW,
}
STEPS = 40
EVALUATES_AT, SAVES_AT, STOPS_AT = 13, 17, 35
"""After which steps it asks for something, where it does."""


class Diary(shoal.Callback):
    """Each line is one write: a process that is killed leaves it whole, or none of it."""

    def __init__(self, asks: bool, logs: bool) -> None:
        self.asks, self.logs = asks, logs

    def on_start(self, context: shoal.CallbackContext) -> None:
        self.write(context, "start", context.step)

    def on_step(self, context: shoal.CallbackContext) -> None:
        self.write(context, "step", context.step, context.loss, context.lr, context.epoch, context.samples)
        if self.logs:
            context.log("double", 2 * context.step)
        if self.asks:
            wishes = {EVALUATES_AT: context.evaluate, SAVES_AT: context.save, STOPS_AT: context.stop}
            wishes.get(context.step, lambda: None)()

    def on_evaluation(self, context: shoal.CallbackContext) -> None:
        self.write(context, "evaluation", context.step, *context.results.values())

    def on_checkpoint(self, context: shoal.CallbackContext, path: Path) -> None:
        assert path.is_dir()
        self.write(context, "checkpoint", int(path.name.partition("-")[2]))

    def on_best(self, context: shoal.CallbackContext, path: Path) -> None:
        assert path.is_file() and context.best == path
        self.write(context, "best", context.step)

    def on_fault(self, context: shoal.CallbackContext, mishap: Mishap) -> None:
        self.write(context, "fault", mishap.kind)

    def on_end(self, context: shoal.CallbackContext, reason: str) -> None:
        assert context.folder is not None and (context.folder / "model.safetensors").is_file()
        self.write(context, "end", reason)

    def write(self, context: shoal.CallbackContext, *words: object) -> None:
        assert context.folder is not None
        fd = os.open(context.folder / DIARY, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(fd, (" ".join(map(str, words)) + "\n").encode())
        os.close(fd)


def _classified(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 5, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 16, generator=generator) + target[:, None], target)


class Paced(nn.Module):
    """Takes a while for each batch that is trained on, whatever the machine."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.pause_s)
        return x


def told(
    steps: int = STEPS,
    asks: bool = False,
    logs: bool = False,
    best: str = "",
    patience: int = 0,
    rate: float = 0.05,
    ema: float | None = None,
    swa: int | None = None,
    optimizer: str = "SGD",
    pause_s: float = 0.0,
) -> shoal.Task:
    paced = [Paced(pause_s)] if pause_s else []
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 5), *paced),
        loss=F.cross_entropy,
        optimizer=lambda params: OPTIMIZERS[optimizer](params, lr=rate),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9),
        train=_classified(208, 1),
        test=_classified(50, 2),
        metrics={"accuracy": shoal.metrics.accuracy},
        batch_size=16,
        epochs=100,
        max_steps=steps,
        evaluate_every=10,
        stop=shoal.Plateau(patience=patience, restore_best=True) if patience else None,
        keep_best=best or None,
        ema=ema,
        swa=swa,
        callbacks=[Diary(asks, logs)],
    )
