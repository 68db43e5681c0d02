"""What passes between the workers of a cut layer, forward and back.

| function   | forward              | backward             |
|------------|----------------------|----------------------|
| `copy_in`  | nothing              | sum over workers     |
| `sum_out`  | sum over workers     | nothing              |
| `gather`   | everybody's parts    | this worker's part   |
| `scatter`  | this worker's part   | everybody's parts    |

Outside of cut layers all workers compute the same, so each has the whole gradient there; that is why the way back
of `sum_out` is no sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function

from shoal.comm.group import Group
from shoal.strategies.mesh.splits import Split


def copy_in(tensor: torch.Tensor, workers: Group) -> torch.Tensor:
    """A whole tensor enters a layer of which each worker has a part."""
    return _CopyIn.apply(tensor, workers)


def sum_out(tensor: torch.Tensor, workers: Group) -> torch.Tensor:
    """The sum of what the workers' parts of a layer have computed leaves it whole."""
    return _SumOut.apply(tensor, workers)


def gather(tensor: torch.Tensor, split: Split, workers: Group) -> torch.Tensor:
    """The whole of what each worker has a part of."""
    return _Gather.apply(tensor, split, workers)


def scatter(tensor: torch.Tensor, split: Split, workers: Group) -> torch.Tensor:
    """This worker's part of a whole tensor."""
    return _Scatter.apply(tensor, split, workers)


def _sum(tensor: torch.Tensor, workers: Group) -> torch.Tensor:
    return workers.all_reduce_(tensor.clone(memory_format=torch.contiguous_format))


def _joined(parts: Sequence[torch.Tensor], split: Split) -> torch.Tensor:
    """The whole, from the parts of all workers."""
    sizes = [size // len(parts) for size in split.blocks] or [parts[0].shape[split.dim]]
    by_worker = [part.split(sizes, split.dim) for part in parts]
    return torch.cat([each[block] for block in range(len(sizes)) for each in by_worker], split.dim)


class _CopyIn(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, workers: Group) -> torch.Tensor:
        ctx.workers = workers
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _sum(grads[0], ctx.workers), None


class _SumOut(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, workers: Group) -> torch.Tensor:
        return _sum(tensor, workers)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, split: Split, workers: Group) -> torch.Tensor:
        ctx.split, ctx.workers = split, workers
        return _joined(workers.all_gather(tensor.contiguous()), split)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.split.cut(grads[0], ctx.workers.index, ctx.workers.size), None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, split: Split, workers: Group) -> torch.Tensor:
        ctx.split, ctx.workers = split, workers
        return split.cut(tensor, workers.index, workers.size)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _joined(ctx.workers.all_gather(grads[0].contiguous()), ctx.split), None, None
