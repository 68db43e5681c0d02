"""Keras's own model with the weights that a run left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.checkpoint.model_file import load_tensors
from shoal.errors import TaskError
from shoal.keras.graph import Rewritable
from shoal.keras.operation import KerasOperation
from shoal.spec import Task


def trained(task: Task, path: str | Path) -> Any:
    """The Keras model of a task of `Task.from_keras`, with the weights of a model's file.

    It is compiled, and can be evaluated, trained on and saved as any other: `model.save("model.keras")`.
    """
    module = task.model()
    if not isinstance(module, Rewritable):
        raise TaskError(
            f"shoal.keras.trained: the task's model ({type(module).__name__}) is not one of Keras's; "
            "use run.model()."
        )
    module.load_state_dict(load_tensors(Path(path)))
    model = module.__dict__["keras_model"]
    for operation in module.modules():
        if isinstance(operation, KerasOperation):
            for bound in operation.bound:
                bound.refresh()
    for layer in model._flatten_layers():
        layer._modules.pop("_torch_params", None)
        layer._track_variables()
    return model
