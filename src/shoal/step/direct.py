"""Linear layers that compute the gradient of a large weight straight into its place.

Autograd would compute it into a fresh buffer, from which the tap copies it: for a wide layer that is as many
bytes as the update itself moves. The values are the same up to rounding; small layers are left alone, because
a function in Python costs them more than it saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shoal.spec.step_form import StepForm
from shoal.step.tap import GradientTap

PLAIN = StepForm()
SMALLEST_DIRECT_BYTES = 1 << 20


def write_directly(
    module: nn.Module, params: Sequence[torch.Tensor], tap: GradientTap, form: StepForm = PLAIN
) -> list[nn.Linear]:
    """Let the large linear layers of a model write to the tap's views; returns the layers it changed."""
    if form.compile or any(
        part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in module.modules()
    ):
        return []  # a compiled model has its own ways
    numbers = {id(param): number for number, param in enumerate(params)}
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear) and _is_suitable(layer, numbers)]
    for layer in layers:
        layer.forward = partial(_forward, layer, tap, numbers[id(layer.weight)])  # type: ignore[method-assign]
    return layers


def leave(layers: Sequence[nn.Linear]) -> None:
    """Give layers their own forward back."""
    for layer in layers:
        layer.__dict__.pop("forward", None)


def _is_suitable(layer: nn.Linear, numbers: Mapping[int, int]) -> bool:
    # Exactly nn.Linear, with its own forward: a subclass or a patched layer may compute anything.
    if type(layer) is not nn.Linear or "forward" in layer.__dict__ or id(layer.weight) not in numbers:
        return False
    weight = layer.weight
    if weight.is_cuda:  # a GPU computes in its own memory, and sends what is to be in the host's
        return False
    return weight.is_contiguous() and weight.numel() * weight.element_size() >= SMALLEST_DIRECT_BYTES


def _forward(layer: nn.Linear, tap: GradientTap, number: int, x: torch.Tensor) -> torch.Tensor:
    plain = torch.is_autocast_enabled(x.device.type) or x.dtype != layer.weight.dtype
    if plain or not torch.is_grad_enabled():
        return F.linear(x, layer.weight, layer.bias)
    return _DirectLinear.apply(x, layer.weight, layer.bias, tap, number)


class _DirectLinear(torch.autograd.Function):
    """`F.linear`, whose weight gradient goes to the tap while the strategy's own backward pass runs."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tap: GradientTap, number: int
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tap, ctx.number = tap, number
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        rows, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        for_x = gradient.matmul(weight) if needs_x else None
        for_weight = None
        if needs_weight and not ctx.tap.take_product(ctx.number, rows.t(), inputs):
            for_weight = rows.t().mm(inputs)
        return for_x, for_weight, rows.sum(0) if needs_bias else None, None, None
