"""Put saved values into a module."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from shoal.checkpoint.folder import read_folder
from shoal.checkpoint.model_file import load_tensors
from shoal.errors import CheckpointError


def load_model(path: Path, module: nn.Module) -> None:
    """Give a module of the same shape the values of a saved model, or of a checkpoint's folder."""
    tensors = read_folder(path, ["model"]).model if path.is_dir() else load_tensors(path)
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} does not fit the task's model; use the arguments it was trained with. ({error})"
        ) from None
