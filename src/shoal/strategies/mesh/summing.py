"""Sums of gradients over workers that hold the same part of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.strategies.mesh.axes import Axis
from shoal.strategies.mesh.wires import receive, send


def sum_flat(tensors: Sequence[torch.Tensor], axis: Axis) -> None:
    """Sum tensors over an axis, in place: all of one dtype in one go."""
    if axis.size == 1:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        own = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = axis.all_reduce_(torch.cat([tensor.reshape(-1) for tensor in own]))
        for tensor, part in zip(own, flat.split([tensor.numel() for tensor in own]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def add_over_stages(gradient: torch.Tensor, stages: Sequence[int], line: Axis) -> None:
    """A parameter that several stages use gets the sum of what each found, with the same bits at all of them."""
    if line.index == stages[0]:
        for other in stages[1:]:
            found = receive(other, line)
            assert found is not None
            gradient.add_(found.to(gradient.device))
        for other in stages[1:]:
            send(gradient, other, line)
    else:
        send(gradient, stages[0], line)
        total = receive(stages[0], line)
        assert total is not None
        gradient.copy_(total)
