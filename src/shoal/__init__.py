"""Shoal trains one model with many processes: say what once, how and where in a word each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.errors import ShoalError
from shoal.lazy import found_in
from shoal.spec import (
    Average,
    Callback,
    CallbackContext,
    Cluster,
    Data,
    Job,
    Layer,
    Mesh,
    ParameterServer,
    Pipeline,
    Plateau,
    Privacy,
    Sharded,
    StepForm,
    Stratified,
    Task,
    TensorParallel,
    Weighted,
    World,
)

if TYPE_CHECKING:
    from shoal import datasets, metrics, optim, ps
    from shoal.launch.live import LiveRun, Run
    from shoal.launch.runs import resume, scale, start, train
    from shoal.launch.saved import Evaluation, evaluate, predict, predictions
    from shoal.model.gathering import gather
    from shoal.model.vocabulary_loss import linear_cross_entropy
    from shoal.roles.trainer.trainer import Trainer
    from shoal.verification import verify

__version__ = "0.1.0"

__all__ = [
    "Average",
    "Callback",
    "CallbackContext",
    "Cluster",
    "Data",
    "Evaluation",
    "Job",
    "Layer",
    "LiveRun",
    "Mesh",
    "ParameterServer",
    "Pipeline",
    "Plateau",
    "Privacy",
    "Run",
    "Sharded",
    "ShoalError",
    "StepForm",
    "Stratified",
    "Task",
    "TensorParallel",
    "Trainer",
    "Weighted",
    "World",
    "__version__",
    "datasets",
    "evaluate",
    "gather",
    "linear_cross_entropy",
    "metrics",
    "optim",
    "predict",
    "predictions",
    "ps",
    "resume",
    "scale",
    "start",
    "train",
    "verify",
]

# Found on first use: `import shoal` stays quick, and does not import torch.
__getattr__ = found_in(
    __name__,
    {
        "Evaluation": "launch.saved",
        "LiveRun": "launch.live",
        "Run": "launch.live",
        "Trainer": "roles.trainer.trainer",
        "datasets": "datasets",
        "evaluate": "launch.saved",
        "gather": "model.gathering",
        "linear_cross_entropy": "model.vocabulary_loss",
        "metrics": "metrics",
        "optim": "optim",
        "predict": "launch.saved",
        "predictions": "launch.saved",
        "ps": "ps",
        "resume": "launch.runs",
        "scale": "launch.runs",
        "start": "launch.runs",
        "train": "launch.runs",
        "verify": "verification",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
