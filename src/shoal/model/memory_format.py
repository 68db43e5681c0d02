"""Images pixel by pixel in memory (`channels_last`), which convolutions read faster."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shoal.errors import SpecError

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of a tensor's dimensions."""


def lay_out_channels_last(module: nn.Module) -> None:
    """Lay out a model's convolutions so; its values stay the same."""
    if not has_images(module):
        raise SpecError(
            f"memory_format=channels_last is for convolutions over images, but the model "
            f"({type(module).__name__}) has none; leave it out."
        )
    for param in module.parameters():
        if (wanted := _FORMATS.get(param.dim())) is not None:
            param.data = param.data.contiguous(memory_format=wanted)


def has_images(module: nn.Module) -> bool:
    """Whether a model has weights that can lie so."""
    return any(param.dim() in _FORMATS for param in module.parameters())


def images_last(batch: Any) -> Any:
    """The same batch, its images laid out so."""
    return tree_map_only(torch.Tensor, _laid_out, batch)


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    wanted = _FORMATS.get(tensor.dim()) if tensor.is_floating_point() else None
    return tensor if wanted is None else tensor.contiguous(memory_format=wanted)
