"""Which module, loss and data an estimator has, as a task that any process can make."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import nn

from shoal.datasets.arrays import Arrays
from shoal.errors import SpecError
from shoal.spec import Plateau, Task

PLAN_FILE, ARRAYS_FILE = "plan.pickle", "arrays.npz"


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """All of a fit but the data."""

    module: Any
    """A module, a function that makes one, or None: a perceptron."""
    layers: tuple[int, ...]
    """Of a perceptron: the widths of its hidden layers."""
    num_inputs: int
    num_outputs: int
    is_classifier: bool
    optimizer: Callable[..., torch.optim.Optimizer]
    lr: float
    weight_decay: float
    batch_size: int
    epochs: int
    patience: int | None
    """Epochs without a better loss on what is held out, after which it stops; None: nothing is held out."""
    seed: int

    def make_module(self) -> nn.Module:
        """A new one, with the weights that it was given."""
        return made_module(self.module, self.layers, self.num_inputs, self.num_outputs)

    def task(self, arrays: dict[str, np.ndarray]) -> Task:
        """What to train."""
        held_out = _rows(arrays, "held_") if self.patience is not None else None
        stop = None if self.patience is None else Plateau(metric="loss", patience=self.patience)
        return Task(
            model=self.make_module,
            loss=self._loss,
            optimizer=lambda params: self.optimizer(params, lr=self.lr, weight_decay=self.weight_decay),
            train=_rows(arrays),
            test=held_out,
            batch_size=min(self.batch_size, len(arrays["x"])),
            epochs=self.epochs,
            stop=stop,
            weight=_total_weight if "w" in arrays else None,
            seed=self.seed,
        )

    def _loss(self, outputs: Any, target: Any) -> Any:
        if isinstance(target, dict):
            return self._weighted_loss(outputs, target["y"], target["w"])
        if not self.is_classifier:
            return nn.functional.mse_loss(outputs.view(target.shape), target)
        return nn.functional.cross_entropy(outputs, target)

    def _weighted_loss(self, outputs: Any, target: Any, weights: Any) -> Any:
        """A mean in which each sample counts its weight."""
        if self.is_classifier:
            losses = nn.functional.cross_entropy(outputs, target, reduction="none")
        else:
            losses = (outputs.view(target.shape) - target).square().reshape(len(target), -1).mean(1)
        return (losses * weights).sum() / weights.sum()


def _rows(arrays: dict[str, np.ndarray], prefix: str = "") -> Any:
    """Inputs and targets, beside which weights lie where samples have some."""
    inputs, target = arrays[f"{prefix}x"], arrays[f"{prefix}y"]
    if f"{prefix}w" not in arrays:
        return inputs, target
    return Arrays((inputs, {"y": target, "w": arrays[f"{prefix}w"]}))


def _total_weight(batch: Any) -> float:
    return float(batch[1]["w"].sum())


def made_module(given: Any, layers: Sequence[int], num_inputs: int, num_outputs: int) -> nn.Module:
    """A module of its own from a module, a function that makes one, or widths of hidden layers."""
    if given is None:
        widths = [num_inputs, *layers]
        hidden: list[nn.Module] = []
        for wide, narrow in pairwise(widths):
            hidden += [nn.Linear(wide, narrow), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(widths[-1], num_outputs))
    if isinstance(given, nn.Module):
        return copy.deepcopy(given)
    if not callable(given):
        raise SpecError(f"module= is a torch module, or makes one, found {given!r}.")
    takes_sizes = len(inspect.signature(given).parameters) >= 2
    made = given(num_inputs, num_outputs) if takes_sizes else given()
    if not isinstance(made, nn.Module):
        raise SpecError(f"module= is a torch module, or makes one, found {type(made).__name__}.")
    return made


def write_plan(folder: Path, plan: TrainingPlan, arrays: dict[str, np.ndarray]) -> None:
    """Leave a fit for other processes of this user to make."""
    (folder / PLAN_FILE).write_bytes(cloudpickle.dumps(plan))
    np.savez(folder / ARRAYS_FILE, **arrays)  # type: ignore[arg-type]


def task(folder: str) -> Task:
    """What was left there, by the process that started this one."""
    plan = cloudpickle.loads((Path(folder) / PLAN_FILE).read_bytes())
    assert isinstance(plan, TrainingPlan)
    with np.load(Path(folder) / ARRAYS_FILE) as arrays:
        return plan.task(dict(arrays))
