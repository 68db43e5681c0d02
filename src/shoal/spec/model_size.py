"""`ModelSize`: what a model and its optimizer weigh, as far as that follows from the model alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model and its optimizer, in bytes."""

    trained: tuple[int, ...]
    """Of each trained parameter, in the model's order."""
    fixed: int = 0
    """Of frozen parameters and buffers together."""
    kept: int = 0
    """How many values the optimizer keeps for each element of a trained parameter."""

    @property
    def parameters(self) -> int:
        """Of all trained parameters; gradients are as large again."""
        return sum(self.trained)

    @property
    def state(self) -> int:
        """Of what the optimizer keeps."""
        return self.kept * self.parameters
