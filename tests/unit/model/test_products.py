"""Linear layers whose products are oneDNN's: the same layer, up to rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shoal.errors import SpecError
from shoal.model.products import ONEDNN, TORCH, LinearProduct, Products, can_multiply_by_onednn, multiply_by_onednn

IN, OUT = 192, 160
SHAPES = [(96, IN), (4, 32, IN), (3, IN), (IN,), (0, IN)]
"""The first two are multiplied by oneDNN, the others are too small."""


def pair(*, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(5)
    plain = nn.Linear(IN, OUT, bias=bias)
    other = copy.deepcopy(plain)
    multiply_by_onednn(other)
    return plain, other


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_are_those_of_the_layer(shape: tuple[int, ...], bias: bool) -> None:
    gradients = []
    for layer in pair(bias=bias):
        x = numbers(*shape).requires_grad_()
        layer(x).square().sum().backward()
        gradients.append([x.grad, *(param.grad for param in layer.parameters())])
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_onednn_is_what_multiplies() -> None:
    calls: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    _, layer = pair()
    with Watch():
        layer(numbers(96, IN).requires_grad_()).sum().backward()
    assert sum("mkldnn._linear_pointwise" in call for call in calls) == 3
    assert not [call for call in calls if "mm" in call]


def test_rows_that_lie_apart_in_memory() -> None:
    plain, other = pair()
    x = numbers(96, 2 * IN)[:, ::2]
    torch.testing.assert_close(other(x), plain(x), rtol=1e-4, atol=1e-5)
    wide = numbers(96, 1).expand(96, IN)
    torch.testing.assert_close(other(wide), plain(wide), rtol=1e-4, atol=1e-5)


def penalty(layer: nn.Linear) -> torch.Tensor:
    (inner,) = torch.autograd.grad(layer(numbers(96, IN)).square().mean(), layer.weight, create_graph=True)
    return inner.square().sum()


def in_half_precision(layer: nn.Linear) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return layer(numbers(96, IN)).float().sum()


def in_float64(layer: nn.Linear) -> torch.Tensor:
    return layer.double()(numbers(96, IN).double()).square().sum()


@pytest.mark.parametrize("loss", [penalty, in_half_precision, in_float64])
def test_what_onednn_is_not_for_goes_torchs_way(loss: Callable[[nn.Linear], torch.Tensor]) -> None:
    found = []
    for layer in pair():
        loss(layer).backward()
        found.append(layer.weight.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    if loss is not penalty:
        assert torch.equal(*found)


def test_a_copy_of_a_layer_multiplies_with_its_own_weight() -> None:
    _, layer = pair()
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    assert not other(numbers(96, IN)).any() and layer(numbers(96, IN)).any()


@pytest.mark.parametrize("products", [TORCH, ONEDNN])
@pytest.mark.parametrize("rows", [2, 96])
def test_products_go_to_a_room(products: Products, rows: int) -> None:
    left, right = numbers(OUT, rows), numbers(rows, IN)
    room = torch.full((OUT, IN), float("nan"))
    products.put(room, left, right)
    torch.testing.assert_close(room, left @ right, rtol=1e-4, atol=1e-4)
    products.add(room, left, right)
    torch.testing.assert_close(room, 2 * (left @ right), rtol=1e-4, atol=1e-4)


def test_layers_that_are_not_torchs_own_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    patched = nn.Linear(4, 4)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    model = nn.Sequential(Own(4, 4), patched, nn.Conv2d(1, 1, 1))
    assert not can_multiply_by_onednn(model)
    with pytest.raises(SpecError, match=r"products=onednn is for linear layers .* has none; leave it out"):
        multiply_by_onednn(model)


def test_numbers_by_autograd_itself() -> None:
    x, weight = numbers(96, IN).requires_grad_(), numbers(OUT, IN).requires_grad_()
    out = LinearProduct.apply(x, weight, None, ONEDNN, lambda left, right: True)
    out.sum().backward()
    assert weight.grad is None, "somebody else has taken it"
    torch.testing.assert_close(x.grad, torch.ones(96, OUT) @ weight.detach(), rtol=1e-4, atol=1e-3)
