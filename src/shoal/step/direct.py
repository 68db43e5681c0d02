"""Linear layers that compute the gradient of a large weight straight into its place.

Autograd would compute it into a fresh buffer, from which the tap copies it: for a wide layer that is as many
bytes as the update itself moves. The values are the same up to rounding; small layers are left alone, because
a function in Python costs them more than it saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from shoal.model.products import ONEDNN, TORCH, is_plain, linear_forward
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
    products = ONEDNN if form.products == "onednn" else TORCH
    numbers = {id(param): number for number, param in enumerate(params)}
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear) and _is_suitable(layer, numbers)]
    for layer in layers:
        take = partial(tap.take_product, numbers[id(layer.weight)], products)
        layer.forward = partial(linear_forward, layer, products, take)  # type: ignore[method-assign]
    return layers


def leave(layers: Sequence[nn.Linear]) -> None:
    """Give layers their own forward back."""
    for layer in layers:
        layer.__dict__.pop("forward", None)


def _is_suitable(layer: nn.Linear, numbers: Mapping[int, int]) -> bool:
    if not is_plain(layer) or id(layer.weight) not in numbers:
        return False
    weight = layer.weight
    if weight.is_cuda:  # a GPU computes in its own memory, and sends what is to be in the host's
        return False
    return weight.is_contiguous() and weight.numel() * weight.element_size() >= SMALLEST_DIRECT_BYTES
