"""Heads of their own for groups of layers that cannot wait for the gradient of the last one."""

from __future__ import annotations

import torch
from torch import nn

from shoal.errors import SpecError

_GRIDS = (4, 2, 1)
"""Features of images are averaged to so many places a side. The mean over all of them would hide what is where,
which is what early layers have found."""
_MOST_INPUTS = 4096
"""Of a head that reads images; with more channels the grid is coarser."""
_FEWEST_HIDDEN, _MOST_HIDDEN = 64, 1024


class AuxiliaryHead(nn.Module):
    """One hidden layer, as wide as a group's features, and then what looks like the model's output.

    Features of images (batch, channels, height, width) are averaged to a small grid; those of sequences (batch,
    length, width) are used one by one, or averaged where the output has no length.
    """

    def __init__(self, features: torch.Tensor, output: torch.Tensor) -> None:
        super().__init__()
        self._is_scalar = output.dim() == 1
        self.pool = _make_pool(features, output)
        inputs = self.pool(features).shape[-1]
        is_image = features.dim() > 3
        width = min(max(features.shape[1 if is_image else -1], _FEWEST_HIDDEN), _MOST_HIDDEN)
        self.hidden = nn.Linear(inputs, width)
        self.output = nn.Linear(width, 1 if self._is_scalar else output.shape[-1])
        # From torch's own, smaller values the head would learn slowly at first, and its group with it.
        nn.init.kaiming_normal_(self.hidden.weight, nonlinearity="relu")
        nn.init.zeros_(self.hidden.bias)
        self.to(features)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """The group's guess of the model's output."""
        found: torch.Tensor = self.output(torch.relu(self.hidden(self.pool(features))))
        return found.squeeze(-1) if self._is_scalar else found


class _MeanOverLength(nn.Module):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features.mean(1)


def _make_pool(features: torch.Tensor, output: torch.Tensor) -> nn.Module:
    """What gives features the shape of the output, but for the last dimension."""
    if features.dim() == max(output.dim(), 2) and features.shape[1:-1] == output.shape[1:-1]:
        return nn.Identity()
    match features.dim() if output.dim() <= 2 else None:
        case 3:
            return _MeanOverLength()
        case 4:
            return nn.Sequential(nn.AdaptiveAvgPool2d(_grid_for(features)), nn.Flatten())
        case 5:
            return nn.Sequential(nn.AdaptiveAvgPool3d(_grid_for(features)), nn.Flatten())
    raise SpecError(
        f"layer: decoupled=on makes a head from each group's features to the model's output, but cannot "
        f"make one from shape {tuple(features.shape)} to {tuple(output.shape)}; use pipeline or place=."
    )


def _grid_for(features: torch.Tensor) -> tuple[int, ...]:
    channels, *sizes = features.shape[1:]
    grids = [tuple(min(side, size) for size in sizes) for side in _GRIDS]
    return next((grid for grid in grids if channels * torch.Size(grid).numel() <= _MOST_INPUTS), grids[-1])
