"""Where a run begins: at the model that the seed makes, or where an earlier run was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a run has behind it. Every process of the run begins from the same."""

    step: int = 0
    """Steps that are committed already."""
    model: Mapping[str, torch.Tensor] | None = None
    """The module's state; None for the model that the task makes."""
    optimizer: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`parameter/key -> tensor`, whole tensors."""
    losses: Sequence[float] = ()
    """The loss of each committed step: what a schedule that follows it has seen."""
    evaluations: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """By step: what the evaluation after it found."""
    sizes: Sequence[int] = ()
    """Samples of each slot in the last step, where they were not even."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the checkpoint says besides: the order of samples that its steps refer to."""

    def load_model(self, module: nn.Module) -> None:
        """Give the module the values that it had."""
        if self.model is None:
            return
        try:
            module.load_state_dict(self.model)
        except RuntimeError as error:
            raise CheckpointError(
                "The saved model does not fit the task's; use the arguments that it was trained with. "
                f"({' '.join(str(error).split())})"
            ) from None
