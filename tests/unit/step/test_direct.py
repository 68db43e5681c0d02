"""Large linear layers write their gradient in its place, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from shoal.step.direct import leave, write_directly
from shoal.step.tap import GradientTap

WIDE = 520  # 520 x 520 floats are more than a mebibyte


class Net(nn.Module):
    """Two wide layers, one of them used twice, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDE, WIDE)
        self.twice = nn.Linear(WIDE, WIDE, bias=False)
        self.small = nn.Linear(WIDE, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        return self.small(self.twice(torch.tanh(self.twice(hidden))))


class Tapped:
    """A model whose gradients are tapped, directly or not."""

    def __init__(self, *, direct: bool) -> None:
        torch.manual_seed(3)
        self.net = Net()
        self.params = list(self.net.parameters())
        self.tap = GradientTap(self.params)
        self.views = [torch.full_like(p, float("nan")).detach() for p in self.params]
        self.touched = np.zeros(len(self.params), dtype=np.uint8)
        self.layers = write_directly(self.net, self.params, self.tap) if direct else []
        self.tap.aim(self.views, self.touched)


@pytest.mark.parametrize("shape", [(5, WIDE), (2, 3, WIDE)])
def test_the_same_gradients_as_through_the_tap(shape: tuple[int, ...]) -> None:
    plain, direct = Tapped(direct=False), Tapped(direct=True)
    assert direct.layers == [direct.net.first, direct.net.twice]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    inputs = []
    for model in (plain, direct):
        own = x.clone().requires_grad_()
        for share in (None, torch.tensor(0.25)):  # a second pass adds to the first
            model.tap.backward(model.net(own).square().mean(), share)
        inputs.append(own.grad)
    assert torch.equal(inputs[0], inputs[1])
    for ours, theirs in zip(direct.views, plain.views, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert direct.touched.all()
    assert all(p.grad is None for p in direct.params)


def test_frozen_layers_and_no_grad() -> None:
    model = Tapped(direct=True)
    model.net.first.requires_grad_(False)
    model.tap.backward(model.net(torch.randn(4, WIDE)).mean(), None)
    assert not model.touched[0] and not model.touched[1] and model.touched[2]
    with torch.no_grad():
        assert not model.net(torch.randn(4, WIDE)).requires_grad


def test_gradients_that_the_user_asks_for() -> None:
    """A gradient penalty differentiates the backward pass; its inner gradients belong to the user."""
    plain, direct = Tapped(direct=False), Tapped(direct=True)
    x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(2))
    for model in (plain, direct):
        (inner,) = torch.autograd.grad(model.net(x).square().mean(), model.net.first.weight, create_graph=True)
        assert inner is not None
        model.tap.backward(inner.square().sum(), None)
    for ours, theirs in zip(direct.views, plain.views, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7, equal_nan=True)
    (bare,) = torch.autograd.grad(direct.net(x).mean(), direct.net.first.weight)
    assert bare.abs().sum() > 0


def test_autocast_and_other_types_go_the_ordinary_way() -> None:
    model = Tapped(direct=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.net(torch.randn(4, WIDE)).float().mean()
    model.tap.backward(loss, None)
    assert model.touched.all()


def test_layers_get_their_forward_back() -> None:
    model = Tapped(direct=True)
    leave(model.layers)
    assert "forward" not in model.net.first.__dict__
    model.net(torch.randn(2, WIDE)).mean().backward()


def test_patched_layers_and_subclasses_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    net = nn.Sequential(Own(WIDE, WIDE), nn.Linear(WIDE, WIDE))
    net[1].forward = lambda x: x  # type: ignore[method-assign]
    params = list(net.parameters())
    assert write_directly(net, params, GradientTap(params)) == []
