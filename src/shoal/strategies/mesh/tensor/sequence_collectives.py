"""What passes between workers of whom each has some rows (tokens) of a tensor: a run of the dimension before last.

| function     | forward                           | backward                          |
|--------------|-----------------------------------|-----------------------------------|
| `enter_rows` | everybody's rows                  | this worker's rows of the sum     |
| `leave_rows` | this worker's rows of the sum     | everybody's rows                  |
| `join_rows`  | everybody's rows                  | this worker's rows                |
| `cut_rows`   | this worker's rows                | everybody's rows                  |
| `use_in_rows`| nothing                           | sum over workers                  |

The first two take the place of `copy_in` and `sum_out` at the ends of a cut block, and send as much together. Rows
that cannot be shared out evenly are padded on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function
from torch.nn import functional as F

from shoal.comm.group import Group


def enter_rows(rows: torch.Tensor, length: int, workers: Group) -> torch.Tensor:
    """The whole, for layers of which each worker has a part."""
    return _EnterRows.apply(rows, length, workers)


def leave_rows(total: torch.Tensor, bias: torch.Tensor | None, workers: Group) -> torch.Tensor:
    """This worker's rows of the sum of what all have computed, and the bias added to them."""
    return _LeaveRows.apply(total, bias, workers)


def join_rows(rows: torch.Tensor, length: int, workers: Group) -> torch.Tensor:
    """The whole, for what all workers compute alike."""
    return _JoinRows.apply(rows, length, workers)


def cut_rows(whole: torch.Tensor, workers: Group) -> torch.Tensor:
    """This worker's rows of what all have whole."""
    return _CutRows.apply(whole, workers)


def use_in_rows(workers: Group, *wholes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What all workers have whole and each uses for its rows (weight and bias of a norm); one sum for all."""
    return _UseInRows.apply(workers, *wholes)


def rows_of(whole: torch.Tensor, workers: Group) -> torch.Tensor:
    """This worker's rows, without a way back; memory of their own."""
    length = whole.shape[-2]
    each = -(-length // workers.size)
    first = min(workers.index * each, length)
    return whole.narrow(-2, first, min(each, length - first)).clone(memory_format=torch.contiguous_format)


def _joined(rows: torch.Tensor, length: int, workers: Group) -> torch.Tensor:
    each = -(-length // workers.size)
    padded = F.pad(rows, (0, 0, 0, each - rows.shape[-2]))
    whole = torch.cat(workers.all_gather(padded.contiguous()), -2)
    return whole if whole.shape[-2] == length else whole.narrow(-2, 0, length).contiguous()


def _summed(total: torch.Tensor, workers: Group) -> torch.Tensor:
    length = total.shape[-2]
    each = -(-length // workers.size)
    padded = F.pad(total, (0, 0, 0, each * workers.size - length))
    rows = workers.reduce_scatter(padded.chunk(workers.size, -2))
    return rows.narrow(-2, 0, max(0, min(each, length - workers.index * each))).contiguous()


class _EnterRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, length: int, workers: Group) -> torch.Tensor:
        ctx.workers = workers
        return _joined(rows, length, workers)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _summed(grads[0], ctx.workers), None, None


class _LeaveRows(Function):
    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, bias: torch.Tensor | None, workers: Group) -> torch.Tensor:
        ctx.length, ctx.workers, ctx.has_bias = total.shape[-2], workers, bias is not None
        rows = _summed(total, workers)
        return rows if bias is None else rows + bias

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        whole = _joined(grads[0], ctx.length, ctx.workers)
        # The whole gradient is here anyway, so that of the bias needs no sum over workers.
        return whole, whole.flatten(0, -2).sum(0) if ctx.has_bias else None, None


class _JoinRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, length: int, workers: Group) -> torch.Tensor:
        ctx.workers = workers
        return _joined(rows, length, workers)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return rows_of(grads[0], ctx.workers), None, None


class _CutRows(Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, workers: Group) -> torch.Tensor:
        ctx.length, ctx.workers = whole.shape[-2], workers
        return rows_of(whole, workers)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _joined(grads[0], ctx.length, ctx.workers), None


class _UseInRows(Function):
    @staticmethod
    def forward(ctx: Any, workers: Group, *wholes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.workers = workers
        return tuple(whole.view_as(whole) for whole in wholes)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *_summed_together(grads, ctx.workers)


def _summed_together(grads: Sequence[torch.Tensor], workers: Group) -> list[torch.Tensor]:
    if len({grad.dtype for grad in grads}) > 1:
        return [workers.all_reduce_(grad.clone(memory_format=torch.contiguous_format)) for grad in grads]
    flat = workers.all_reduce_(torch.cat([grad.reshape(-1) for grad in grads]))
    sums = flat.split([grad.numel() for grad in grads])
    return [one.view(grad.shape) for one, grad in zip(sums, grads, strict=True)]
