"""What of a batch is given to the model, where nobody asks for a loss."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn


class ModelInputs:
    """Takes a model's inputs out of batches: of `(inputs, target)` the first part, of a dict what `forward` names.

    It reads the model's signature when it is made: before a strategy cuts the model.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = inspect.signature(module.forward).parameters.values()
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self._named = None if takes_all else {one.name for one in parameters}
        """The arguments that the model takes by name; None: any."""

    def of(self, batch: Any) -> Any:
        """The inputs of a batch, as `call_model` takes them."""
        if isinstance(batch, Mapping):
            return {name: value for name, value in batch.items() if self._named is None or name in self._named}
        return batch[0] if isinstance(batch, (tuple, list)) else batch
