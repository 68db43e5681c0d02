"""Heads of their own for groups of layers that cannot wait for the gradient of the last one."""

from __future__ import annotations

import torch
from torch import nn

from shoal.errors import SpecError


class AuxiliaryHead(nn.Module):
    """A linear layer from a group's features to what looks like the model's output.

    Features of images (batch, channels, height, width) are averaged over places; those of sequences (batch,
    length, width) are used one by one, or averaged where the output has no length.
    """

    def __init__(self, features: torch.Tensor, output: torch.Tensor) -> None:
        super().__init__()
        self._shape = output.shape[1:]
        self._pooled = _pooled_dims(features, output)
        width = features.mean(self._pooled).shape[-1] if self._pooled else features.shape[-1]
        outputs = output.shape[-1] if output.dim() > 1 else 1
        self.linear = nn.Linear(width, outputs, dtype=features.dtype, device=features.device)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """The group's guess of the model's output."""
        pooled = features.mean(self._pooled) if self._pooled else features
        found = self.linear(pooled)
        return found if self._shape else found.squeeze(-1)


def _pooled_dims(features: torch.Tensor, output: torch.Tensor) -> tuple[int, ...]:
    if features.dim() == max(output.dim(), 2) and features.shape[1:-1] == output.shape[1:-1]:
        return ()
    if features.dim() == 3 and output.dim() <= 2:
        return (1,)
    if features.dim() >= 4 and output.dim() <= 2:
        return tuple(range(2, features.dim()))
    raise SpecError(
        f"layer: decoupled=on makes a linear head from each group's features to the model's output, but cannot "
        f"make one from shape {tuple(features.shape)} to {tuple(output.shape)}; use pipeline or place=."
    )
