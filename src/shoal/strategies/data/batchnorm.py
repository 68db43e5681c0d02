"""BatchNorm over the whole global batch, wherever its slots are."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.errors import SpecError, TaskError
from shoal.model.gathering import Asking, Question
from shoal.model.normalising import BatchNormalising
from shoal.strategies.base import Setting


def batchnorm_layers(module: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]


def check_pieces(setting: Setting) -> None:
    """Every slot must have samples for every pass."""
    extent, slots = setting.extent, setting.slots
    if extent.smallest_batch is not None and extent.smallest_batch // slots < extent.accumulate:
        raise SpecError(
            f"batchnorm=sync needs samples for all {slots * extent.accumulate} micro-batches of every batch, but "
            f"the last one of an epoch has only {extent.smallest_batch}; choose another batch_size."
        )


def check_took_part(weight: float, step: int) -> None:
    """A slot whose samples count nothing runs no pass, and the others would wait for its sums for ever."""
    if not weight > 0:
        raise TaskError(
            f"batchnorm=sync needs every slot in every pass, but the samples of one counted nothing at "
            f"step {step}; leave samples without weight out of the data, or use batchnorm=local."
        )


def synchronise(module: nn.Module, asking: Asking) -> None:
    """Let every BatchNorm layer of a model normalise by the whole batch while training."""
    for layer in module.modules():
        if isinstance(layer, BatchNormalising):
            layer.synchronise(asking)
    for layer in batchnorm_layers(module):
        layer.__dict__["asking"] = asking  # where `recompute` finds it
        layer.forward = partial(_forward, layer, asking)  # type: ignore[method-assign]


def _forward(layer: _BatchNorm, asking: Asking, x: torch.Tensor) -> torch.Tensor:
    if not layer.training:
        return type(layer).forward(layer, x)
    channels = x.shape[1]
    # As torch does: half precision cannot hold the sums, nor tell a value from its mean.
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    normalised, mean, variance, count = _Normalise.apply(wide, layer.eps, asking)
    if layer.track_running_stats and layer.running_mean is not None and layer.running_var is not None:
        with torch.no_grad():
            assert layer.num_batches_tracked is not None
            layer.num_batches_tracked.add_(1)
            momentum = layer.momentum if layer.momentum is not None else 1 / float(layer.num_batches_tracked)
            unbiased = variance * (count / max(count - 1, 1))
            layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
            layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), momentum)
    shape = [1, channels] + [1] * (x.dim() - 2)
    if layer.affine:
        normalised = normalised * layer.weight.view(shape) + layer.bias.view(shape)
    return normalised.to(x.dtype)


class _Normalise(torch.autograd.Function):
    """(x - mean) / deviation with the statistics of all slots."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float, asking: Asking) -> Any:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        shape = [1, x.shape[1]] + [1] * (x.dim() - 2)
        local = torch.cat([x.sum(axes).double(), x.new_tensor([x.numel() / x.shape[1]], dtype=torch.float64)])
        totals = asking(local, Question.SUMS).total
        count = float(totals[-1])
        mean = totals[:-1] / count
        centred = x - mean.to(x.dtype).view(shape)
        # The variance takes a second pass: differences of large sums would lose it.
        variance = asking((centred * centred).sum(axes).double(), Question.SUMS).total / count
        inverse = (variance + eps).rsqrt().to(x.dtype).view(shape)
        normalised = centred * inverse
        ctx.save_for_backward(normalised, inverse)
        ctx.count, ctx.axes, ctx.shape, ctx.asking = count, axes, shape, asking
        ctx.mark_non_differentiable(mean, variance)
        return normalised, mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0]
        normalised, inverse = ctx.saved_tensors
        local = torch.cat([gradient.sum(ctx.axes), (gradient * normalised).sum(ctx.axes)]).double()
        means = (ctx.asking.ask(local, Question.SUMS).total / ctx.count).to(gradient.dtype)
        mean_gradient, mean_product = (half.reshape(ctx.shape) for half in means.chunk(2))
        return (gradient - mean_gradient - normalised * mean_product) * inverse, None, None
