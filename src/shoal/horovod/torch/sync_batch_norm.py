"""BatchNorm with the statistics of all ranks' batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.horovod.runtime import ProcessSet, global_process_set
from shoal.horovod.torch.mpi_ops import Sum, allgather_async, allreduce_async, synchronize


class SyncBatchNorm(_BatchNorm):
    """Takes the place of any BatchNorm layer. Ranks may have different numbers of samples, also none."""

    def __init__(self, *args: Any, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.process_set = process_set

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalised, per channel."""
        self._check_input_dim(input)
        if not self.training and self.track_running_stats:
            return super().forward(input)
        normalised, mean, variance, count = _Normalised.apply(input, self.eps, self.process_set)
        if self.training and self.track_running_stats:
            self._move_statistics(mean, variance, float(count))
        shape = (1, -1, *[1] * (input.dim() - 2))
        if self.weight is not None:
            normalised = normalised * self.weight.view(shape) + self.bias.view(shape)
        return normalised

    @torch.no_grad()
    def _move_statistics(self, mean: Tensor, variance: Tensor, count: float) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / max(count - 1, 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, eps: float, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = (1, -1, *[1] * (input.dim() - 2))
        own_count = input.numel() // max(1, input.shape[1])
        wide = input.double() if input.dtype == torch.float64 else input.float()
        own_mean = wide.mean(axes) if own_count else wide.new_zeros(input.shape[1])
        own_square = ((wide - own_mean.view(shape)) ** 2).sum(axes)
        counted = torch.full_like(own_mean, own_count)
        # Squares around each rank's own mean: differences of large sums would lose them.
        rows = synchronize(allgather_async(torch.stack([counted, own_mean, own_square])[None], None, process_set))
        counts, means, squares = rows[:, 0], rows[:, 1], rows[:, 2]
        count = counts.sum(0).clamp(min=1)
        mean = (counts * means).sum(0) / count
        variance = (squares + counts * (means - mean) ** 2).sum(0) / count
        scale = (variance + eps).rsqrt()
        normalised = ((wide - mean.view(shape)) * scale.view(shape)).to(input.dtype)
        ctx.save_for_backward(normalised, scale, count)
        ctx.how = axes, shape, process_set
        total = count[0]
        ctx.mark_non_differentiable(mean, variance, total)
        return normalised, mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        normalised, scale, count = ctx.saved_tensors
        axes, shape, process_set = ctx.how
        gradient = gradients[0].to(scale.dtype)
        values = normalised.to(scale.dtype)
        sums = torch.stack([gradient.sum(axes), (gradient * values).sum(axes)])
        sums = synchronize(allreduce_async(sums, None, None, Sum, process_set=process_set)) / count
        inner = gradient - sums[0].view(shape) - values * sums[1].view(shape)
        return (inner * scale.view(shape)).to(normalised.dtype), None, None
