"""What of a batch is given to the model, where nobody asks for a loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from shoal.errors import TaskError


class ModelInputs:
    """Takes a model's inputs out of batches: of `(inputs, target)` the first part, of dicts what `forward` names.

    It reads the model's signature when it is made: before a strategy cuts the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._named = _argument_names(module)

    def of(self, batch: Any) -> Any:
        """The inputs of a batch, as `call_model` takes them."""
        given = batch[0] if isinstance(batch, (tuple, list)) else batch
        if not isinstance(given, Mapping):
            return given
        inputs = {name: value for name, value in given.items() if self._named is None or name in self._named}
        if not inputs:
            raise TaskError(
                f"predict: a batch of this task holds {', '.join(map(str, given))}, and its model takes "
                f"{', '.join(self._named or ())}; let forward() call its arguments as the batch does."
            )
        return inputs


def _argument_names(module: nn.Module) -> list[str] | None:
    """What the model takes by name; None: anything, or nobody can tell."""
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # it is not written in Python
        return None
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    # Models of transformers name all that they take, and hand options on besides.
    return None if takes_all and "labels" not in parameters else list(parameters)
