"""The products of linear layers: as torch makes them, or by oneDNN.

On x86 torch takes MKL for products in float32, which on AMD's processors gets half of what they can do. oneDNN
comes with torch, too, for half precision and convolutions; its products in float32 have the same precision, and
are rounded in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shoal.errors import SpecError

_FEWEST_ROWS = 8
_FEWEST_MULTIPLICATIONS = 1 << 21
"""Below that a call costs more than it saves."""

TakeProduct = Callable[[torch.Tensor, torch.Tensor], bool]
"""Computes a weight's gradient, the product of these two, in its place; False where autograd must have it."""


class Products:
    """What a linear layer multiplies, as torch does it."""

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """That of the layer."""
        return F.linear(x, weight, bias)

    def matrix(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """`left @ right`, where `right` has two dimensions."""
        return left.matmul(right)

    def put(self, room: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Have `left @ right` in this room."""
        torch.mm(left, right, out=room)

    def add(self, room: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add `left @ right` to what lies in this room."""
        room.addmm_(left, right)


class OneDnnProducts(Products):
    """By oneDNN, where that pays."""

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not _pays(x, weight):
            return super().output(x, weight, bias)
        return _linear(x, weight, bias)

    def matrix(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if not _pays(left, right):
            return super().matrix(left, right)
        return _linear(left, right.t(), None)

    def put(self, room: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        if _pays(left, right):
            room.copy_(self.matrix(left, right))
        else:
            super().put(room, left, right)

    def add(self, room: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        if _pays(left, right):
            room.add_(self.matrix(left, right))
        else:
            super().add(room, left, right)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if torch.compiler.is_compiling():
        found: torch.Tensor = torch.ops.shoal.onednn_linear(x, weight, bias)
        return found
    return _onednn_linear(x, weight, bias)


def _onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


@cache
def _tell_compiler() -> None:
    """What compiles takes torch's own operation for one of a frozen model: let it see another, and not inside."""
    named = torch.library.custom_op("shoal::onednn_linear", _onednn_linear, mutates_args=())
    named.register_fake(lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]))


TORCH, ONEDNN = Products(), OneDnnProducts()


def _pays(left: torch.Tensor, right: torch.Tensor) -> bool:
    """`right`: two dimensions, one of which is multiplied with the last of `left`."""
    inner = left.shape[-1]
    rows = left.numel() // max(inner, 1)
    return rows >= _FEWEST_ROWS and rows * right.numel() >= _FEWEST_MULTIPLICATIONS


class LinearProduct(torch.autograd.Function):
    """`F.linear` by products of choice. `take`: who takes the weight's gradient, in place of autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        products: Products,
        take: TakeProduct | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products, ctx.take = products, take
        return products.output(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        # What is differentiated once more needs torch's own.
        products = TORCH if torch.is_grad_enabled() else ctx.products
        gradient = gradients[0]
        rows, inputs = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        for_x = products.matrix(gradient, weight) if needs_x else None
        for_weight = None
        if needs_weight and (ctx.take is None or not ctx.take(rows.t(), inputs)):
            for_weight = products.matrix(rows.t(), inputs)
        return for_x, for_weight, rows.sum(0) if needs_bias else None, None, None


def linear_forward(
    layer: nn.Linear, products: Products, take: TakeProduct | None, x: torch.Tensor
) -> torch.Tensor:
    """In place of a layer's own `forward`; other types than its weight's, and autocast, go the ordinary way."""
    if torch.is_autocast_enabled(x.device.type) or x.dtype != layer.weight.dtype:
        return F.linear(x, layer.weight, layer.bias)
    if products is not TORCH and layer.weight.dtype != torch.float32:
        products = TORCH
    if not torch.is_grad_enabled():
        return products.output(x, layer.weight, layer.bias)
    found: torch.Tensor = LinearProduct.apply(x, layer.weight, layer.bias, products, take)
    return found


def is_plain(layer: nn.Module) -> bool:
    """Whether this is exactly nn.Linear, with its own forward or ours: a subclass or a patched layer may compute
    anything."""
    if type(layer) is not nn.Linear:
        return False
    own = layer.__dict__.get("forward")
    return own is None or (isinstance(own, partial) and own.func is linear_forward)


def can_multiply_by_onednn(module: nn.Module) -> bool:
    """Whether there is a layer that could."""
    return torch.backends.mkldnn.is_available() and bool(_plain_layers(module))


def _plain_layers(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear) and is_plain(layer)]


def multiply_by_onednn(module: nn.Module) -> None:
    """Have all linear layers of a model do so."""
    if not torch.backends.mkldnn.is_available():
        raise SpecError("products=onednn: this build of torch has no oneDNN; leave it out.")
    if not (layers := _plain_layers(module)):
        raise SpecError(
            f"products=onednn is for linear layers (torch.nn.Linear), but the model ({type(module).__name__}) has "
            "none; leave it out."
        )
    _tell_compiler()
    for layer in layers:
        layer.forward = partial(linear_forward, layer, ONEDNN, None)  # type: ignore[method-assign]
