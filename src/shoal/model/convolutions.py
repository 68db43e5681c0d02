"""Convolutions over small images, whose weights' gradients are one product of all patches.

oneDNN goes through an image for each weight, which pays where images are large. Where a layer has many more
weights than places to put them (the last layers of most networks), all patches that its kernel meets are few
numbers: copied side by side they make the gradient a matrix product, which took half of the time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shoal.errors import SpecError
from shoal.model.products import ONEDNN, TORCH, Products

_MOST_POSITIONS = 49
_FEWEST_CHANNELS = 128
"""Where more positions, or fewer channels, are read, copies cost more than they save."""


def _patches(x: torch.Tensor, layer_shape: torch.Size, stride: list[int], padding: list[int]) -> torch.Tensor:
    """A row for each position of the kernel: what it meets there, in the order of weights in `channels_last`."""
    height, width = layer_shape[2:]
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    met = padded.unfold(2, height, stride[0]).unfold(3, width, stride[1])  # image, channel, position, kernel
    return met.permute(0, 2, 3, 4, 5, 1).reshape(-1, height * width * x.shape[1])


class PatchedConvolution(torch.autograd.Function):
    """`F.conv2d` without groups or dilation; its weight's gradient is made from patches."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: list[int],
        padding: list[int],
        products: Products,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding, ctx.products = stride, padding, products
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # What is differentiated once more needs torch's own.
        by_patches = needs_weight and not torch.is_grad_enabled()
        asked = [needs_x, needs_weight and not by_patches, needs_bias]
        for_x = for_weight = for_bias = None
        if any(asked):
            bias_sizes, whole = [len(weight)], [1, 1]
            for_x, for_weight, for_bias = torch.ops.aten.convolution_backward(
                gradient, x, weight, bias_sizes, ctx.stride, ctx.padding, whole, False, [0, 0], 1, asked
            )
        if by_patches:
            rows = gradient.permute(0, 2, 3, 1).reshape(-1, len(weight))
            made = ctx.products.matrix(rows.t(), _patches(x, weight.shape, ctx.stride, ctx.padding))
            for_weight = made.view(len(weight), *weight.shape[2:], -1).permute(0, 3, 1, 2)
        return for_x, for_weight, for_bias, None, None, None


def convolution_forward(layer: nn.Conv2d, products: Products, x: torch.Tensor) -> torch.Tensor:
    """In place of a layer's own `forward`."""
    assert isinstance(layer.padding, tuple)
    if not torch.is_grad_enabled() or x.dim() != 4 or not _pays(layer, x):
        return F.conv2d(x, layer.weight, layer.bias, layer.stride, layer.padding)
    kind, weight, bias = layer.weight.dtype, layer.weight, layer.bias
    if torch.is_autocast_enabled(x.device.type):
        # As autocast has it, which does not look into functions of ours.
        kind = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(kind), weight.to(kind), None if bias is None else bias.to(kind)
    products = products if kind == torch.float32 else TORCH
    stride, padding = list(layer.stride), list(layer.padding)
    found: torch.Tensor = PatchedConvolution.apply(x, weight, bias, stride, padding, products)
    return found


def _pays(layer: nn.Conv2d, x: torch.Tensor) -> bool:
    assert isinstance(layer.padding, tuple)
    sizes = zip(x.shape[2:], layer.padding, layer.kernel_size, layer.stride, strict=True)
    high, wide = ((size + 2 * padding - kernel) // stride + 1 for size, padding, kernel, stride in sizes)
    return 0 < high * wide <= _MOST_POSITIONS and x.numel() > 0


def can_use_patches(module: nn.Module) -> bool:
    """Whether there is a layer that could."""
    return bool(_layers(module))


def _layers(module: nn.Module) -> list[nn.Conv2d]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Conv2d) and _is_meant(layer)]


def _is_meant(layer: nn.Conv2d) -> bool:
    """A subclass, or a layer with a forward of its own, may compute anything."""
    is_own = type(layer) is nn.Conv2d and "forward" not in layer.__dict__
    is_simple = layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"
    return is_own and is_simple and isinstance(layer.padding, tuple) and layer.in_channels >= _FEWEST_CHANNELS


def use_patches(module: nn.Module, *, by_onednn: bool) -> None:
    """Have all layers of a model do so that have many channels; how large their images are is seen in a step."""
    if not (layers := _layers(module)):
        raise SpecError(
            f"convolutions=patches is for convolutions (torch.nn.Conv2d) of {_FEWEST_CHANNELS} channels or more, "
            f"without groups or dilation, but the model ({type(module).__name__}) has none; leave it out."
        )
    for layer in layers:
        layer.forward = partial(convolution_forward, layer, ONEDNN if by_onednn else TORCH)  # type: ignore[method-assign]
