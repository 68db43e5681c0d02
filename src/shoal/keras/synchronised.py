"""The moments of Keras's BatchNorm over the batches of all slots."""

from __future__ import annotations

from typing import Any

import torch

from shoal.model.gathering import Asking, Question


def shared_moments(layer: Any, asking: Asking, inputs: torch.Tensor, mask: Any) -> tuple[Any, Any]:
    """In the place of a layer's `_moments`: mean and variance over all slots, with gradients through."""
    axes = list(layer._reduction_axes)
    counted = torch.ones_like(inputs) if mask is None else mask.to(inputs.dtype).unsqueeze(-1).expand_as(inputs)
    count = _Summed.apply(counted.sum(axes), asking)
    if mask is not None:
        from keras.src import backend

        count = count + backend.epsilon()  # as Keras divides where it masks
    shape = [1] * inputs.dim()
    shape[layer.axis] = -1
    mean = _Summed.apply((inputs * counted).sum(axes), asking) / count
    # The variance takes a second pass: differences of large sums would lose it.
    distance = (inputs - mean.reshape(shape)) * counted
    return mean, _Summed.apply((distance * distance).sum(axes), asking) / count


class _Summed(torch.autograd.Function):
    """A sum over all slots; what it is used for in any slot goes back to all of them."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, asking: Asking) -> torch.Tensor:
        ctx.asking = asking
        return asking(local.double(), Question.SUMS).total.to(local.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0]
        return ctx.asking.ask(gradient.double(), Question.SUMS).total.to(gradient.dtype), None
