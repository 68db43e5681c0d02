"""Convolutions whose weights' gradients are made from patches: the same layer, up to rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import SpecError
from shoal.model.convolutions import can_use_patches, use_patches

CHANNELS = 128
LAYERS: list[dict[str, Any]] = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "bias": False},
    {"kernel_size": 1},
    {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 0)},
    {"kernel_size": 5},
]


def pair(by_onednn: bool = False, **options: Any) -> tuple[nn.Conv2d, nn.Conv2d]:
    torch.manual_seed(5)
    plain = nn.Conv2d(CHANNELS, 24, **options).to(memory_format=torch.channels_last)
    other = copy.deepcopy(plain)
    use_patches(other, by_onednn=by_onednn)
    return plain, other


def images(count: int = 4, size: tuple[int, int] = (6, 7)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, CHANNELS, *size, generator=generator).contiguous(memory_format=torch.channels_last)


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Which operations were called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("by_onednn", [False, True])
@pytest.mark.parametrize("options", LAYERS)
def test_outputs_and_gradients_are_those_of_the_layer(options: dict[str, Any], by_onednn: bool) -> None:
    gradients = []
    for layer in pair(by_onednn, **options):
        x = images().requires_grad_()
        with Watch() as watch:
            layer(x).square().sum().backward()
        gradients.append([x.grad, *(param.grad for param in layer.parameters())])
    assert any("mm" in call or "_linear_pointwise" in call for call in watch.calls), "made from patches"
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-2)


def test_gradients_lie_in_memory_as_weights_do() -> None:
    _, layer = pair(kernel_size=3)
    layer(images()).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.stride() == layer.weight.stride()


def test_half_precision_is_that_of_autocast() -> None:
    found = []
    for layer in pair(kernel_size=3, padding=1):
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(images())
            assert out.dtype == torch.bfloat16
            out.float().square().sum().backward()
        found.append([out, layer.weight.grad, layer.bias.grad])
    assert torch.equal(found[0][0], found[1][0])
    for theirs, ours in zip(found[0][1:], found[1][1:], strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=0.5)


def of_large_images(layer: nn.Conv2d) -> torch.Tensor:
    return layer(images(2, (12, 12))).square().sum()


def of_one_image(layer: nn.Conv2d) -> torch.Tensor:
    return layer(images(1)[0]).square().sum()


def test_gradients_can_be_differentiated() -> None:
    found = []
    for layer in pair(kernel_size=3, padding=1):
        (inner,) = torch.autograd.grad(layer(images()).square().mean(), layer.weight, create_graph=True)
        inner.square().sum().backward()
        found.append(layer.weight.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", [of_large_images, of_one_image])
def test_what_patches_are_not_for_goes_torchs_way(loss: Callable[[nn.Conv2d], torch.Tensor]) -> None:
    found = []
    for layer in pair(kernel_size=3, padding=1):
        with Watch() as watch:
            loss(layer).backward()
        assert not [call for call in watch.calls if "aten.mm" in call]
        found.append(layer.weight.grad)
    assert torch.equal(*found)


def test_no_images_and_weights_that_are_not_trained() -> None:
    _, layer = pair(kernel_size=3)
    assert layer(images(0)).shape == (0, 24, 4, 5)
    layer.weight.requires_grad_(False)
    x = images().requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None and layer.bias.grad is not None
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_a_copy_of_a_layer_has_its_own_weight() -> None:
    _, layer = pair(kernel_size=3, bias=False)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
    assert not other(images()).any() and layer(images()).any()


def test_layers_that_are_others_are_left_alone() -> None:
    class OwnConvolution(nn.Conv2d):
        pass

    patched = nn.Conv2d(CHANNELS, 4, 3)
    patched.forward = lambda x: x  # type: ignore[method-assign,assignment]
    others = [
        OwnConvolution(CHANNELS, 4, 3),
        nn.Conv2d(CHANNELS - 1, 4, 3),
        nn.Conv2d(CHANNELS, 4, 3, groups=4),
        nn.Conv2d(CHANNELS, 4, 3, dilation=2),
        nn.Conv2d(CHANNELS, 4, 3, padding="same"),
        nn.Conv2d(CHANNELS, 4, 3, padding=1, padding_mode="circular"),
    ]
    model = nn.Sequential(patched, *others)
    assert not can_use_patches(model)
    with pytest.raises(SpecError, match=r"convolutions=patches is for convolutions .* has none; leave it out"):
        use_patches(model, by_onednn=False)
    assert not [layer for layer in others if "forward" in layer.__dict__]
