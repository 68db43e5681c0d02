"""Sums of gradients over workers that hold the same part of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.comm.group import Group
from shoal.strategies.cut.wires import receive_values, send_values


def sum_flat(tensors: Sequence[torch.Tensor], group: Group) -> None:
    """Sum tensors over a group, in place: all of one dtype in one go."""
    if group.size == 1:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        own = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = group.all_reduce_(torch.cat([tensor.reshape(-1) for tensor in own]))
        for tensor, part in zip(own, flat.split([tensor.numel() for tensor in own]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def add_over_stages(gradient: torch.Tensor, stages: Sequence[int], row: Group) -> None:
    """A parameter that several stages use gets the sum of what each found, with the same bits at all of them."""
    room = torch.empty(gradient.shape, dtype=gradient.dtype)
    if row.index == stages[0]:
        for other in stages[1:]:
            gradient.add_(receive_values(room, other, row).to(gradient.device))
        for other in stages[1:]:
            send_values(gradient, other, row)
    else:
        send_values(gradient, stages[0], row)
        gradient.copy_(receive_values(room, stages[0], row))
