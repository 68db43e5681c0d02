"""Shoal trains one model with many processes: say what once, how and where in a word each."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.errors import ShoalError
from shoal.spec import Cluster, Data, Job, ParameterServer, Plateau, Stratified, Task, Weighted, World

if TYPE_CHECKING:
    from shoal import datasets, metrics, optim, ps
    from shoal.launch.runs import Run, train
    from shoal.launch.saved import Evaluation, evaluate, predict
    from shoal.roles.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Data",
    "Evaluation",
    "Job",
    "ParameterServer",
    "Plateau",
    "Run",
    "ShoalError",
    "Stratified",
    "Task",
    "Trainer",
    "Weighted",
    "World",
    "__version__",
    "datasets",
    "evaluate",
    "metrics",
    "optim",
    "predict",
    "ps",
    "train",
]

# Found on first use: `import shoal` stays quick, and does not import torch.
_LAZY = {
    "Evaluation": "shoal.launch.saved",
    "Run": "shoal.launch.runs",
    "Trainer": "shoal.roles.trainer",
    "evaluate": "shoal.launch.saved",
    "predict": "shoal.launch.saved",
    "train": "shoal.launch.runs",
}


def __getattr__(name: str) -> Any:
    if name in ("datasets", "metrics", "optim", "ps"):
        return import_module(f"shoal.{name}")
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
