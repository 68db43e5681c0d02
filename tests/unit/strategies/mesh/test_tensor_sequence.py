"""Parts of a sequence, at workers that are threads, against the whole: values, gradients, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.comm.group import ThreadGroup, together
from shoal.strategies.mesh.tensor.sequence import SequencePart, entered, whole_of
from shoal.strategies.mesh.tensor.sequence_collectives import leave_rows

WIDTH = 6
LENGTHS = [8, 7, 5]
"""Even; uneven; so short that with four workers one has no rows."""


class RootMeanSquare(nn.Module):
    """A norm in plain operations, as libraries write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float64)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Doubled(torch.autograd.Function):
    """Code that does not ask a tensor's class what to do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return 2 * grads[0]


def changed_in_place(x: Tensor, norm: nn.Module) -> Tensor:
    y = x * 2
    y[:, 0] = 0
    y += x
    return norm(y)


def changed_by_a_view(x: Tensor, norm: nn.Module) -> Tensor:
    y = x * 2
    first = y[:, 0]
    first.mul_(3)
    return norm(y) + y


def looked_at_first(x: Tensor, norm: nn.Module) -> Tensor:
    y = norm(x)
    with torch.no_grad():
        scale = y.abs().amax()
    return y / scale + y.softmax(1)


WAYS: dict[str, Callable[[Tensor, nn.Module], Tensor]] = {
    "token by token": lambda x, norm: x + F.gelu(norm(x + x.new_ones(WIDTH)) * 0.5) - norm(x),
    "with a whole": lambda x, norm: norm(x) + torch.arange(x.shape[1] * WIDTH).view(x.shape[1], WIDTH) / 9,
    "all tokens": lambda x, norm: norm(x).cumsum(1) + x.mean(1, keepdim=True),
    "in place": changed_in_place,
    "by a view": changed_by_a_view,
    "looked at": looked_at_first,
    "past the class": lambda x, norm: Doubled.apply(norm(x)) + x,
    "checkpointed": lambda x, norm: checkpoint(lambda y: norm(y) * y, x + 1, use_reentrant=False),
}


@pytest.mark.parametrize("norm", [nn.LayerNorm(WIDTH, dtype=torch.float64), RootMeanSquare()])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("count", "length"), [(2, 7), *((4, length) for length in LENGTHS)])
def test_as_the_whole(way: str, norm: nn.Module, count: int, length: int) -> None:
    data = torch.randn(2, length, WIDTH, dtype=torch.float64)
    params = list(norm.parameters())

    def run(cut: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = data.clone().requires_grad_()
        output = whole_of(WAYS[way](cut(x), norm))
        score = (output * torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view_as(output)).sum()
        return [output.detach(), *torch.autograd.grad(score, [x, *params])]

    expected = run(lambda x: x)
    for found in together(count, lambda worker: run(lambda x: SequencePart.cut(x, worker))):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_sums_arrive_in_rows_and_enter_whole() -> None:
    """As at the ends of a cut block: gradients of partial sums are whole, and those of the parts are summed."""
    weight, bias = torch.randn(4, WIDTH, dtype=torch.float64), torch.randn(WIDTH, dtype=torch.float64)
    data = torch.randn(2, 5, 4, dtype=torch.float64)

    def run(worker: ThreadGroup) -> list[Tensor]:
        x, own, added = (
            data.clone().requires_grad_(),
            weight.clone().requires_grad_(),
            bias.clone().requires_grad_(),
        )
        share = torch.zeros(4, dtype=torch.float64)
        share[worker.index] = share[worker.index + 2] = 1
        total = entered(SequencePart.cut(x, worker), worker) * share @ own
        part = SequencePart.wrap(leave_rows(total, added, worker), 5, worker)
        output = part.whole()
        return [output.detach(), *torch.autograd.grad(output.square().sum(), [x, own, added])]

    first, second = together(2, run)
    x, own, added = (one.clone().requires_grad_() for one in (data, weight, bias))
    output = x @ own + added
    grads = torch.autograd.grad(output.square().sum(), [x, own, added])
    for found in (first, second):
        torch.testing.assert_close(found[:2] + found[3:], [output.detach(), grads[0], grads[2]])
    torch.testing.assert_close(first[2] + second[2], grads[1])  # each has the rows of its features


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_that_of_the_whole(dtype: torch.dtype) -> None:
    x = torch.randn(3, 7, WIDTH).to(dtype)
    torch.manual_seed(4)
    expected, drawn_next = F.dropout(x, 0.4), torch.rand(3)
    # One after the other: threads share a generator, processes do not.
    for worker in together(3, lambda worker: worker):
        torch.manual_seed(4)
        part = F.dropout(SequencePart.cut(x, worker), 0.4)
        first = 3 * worker.index
        assert isinstance(part, SequencePart)
        assert torch.equal(part.local, expected[:, first : first + 3])
        assert torch.equal(torch.rand(3), drawn_next)


def test_several_layers_gather_what_they_share_once() -> None:
    def sent(worker: ThreadGroup) -> float:
        part = SequencePart.cut(torch.randn(2, 4, WIDTH), worker)
        before = worker.sent_bytes
        entered(part, worker), entered(part, worker)
        return worker.sent_bytes - before

    assert together(2, sent) == [2 * 2 * WIDTH * 4] * 2


def test_a_checkpoint_keeps_rows_alone() -> None:
    """What a recomputed block is given is kept as it is: a part."""

    def kept(worker: ThreadGroup) -> int:
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.local.numel() if isinstance(tensor, SequencePart) else tensor.numel())
            return tensor

        x = torch.randn(2, 8, WIDTH, requires_grad=True)
        part = SequencePart.cut(x, worker)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = checkpoint(lambda y: F.layer_norm(y, (WIDTH,)) * y, part, use_reentrant=False)
        output.whole().sum().backward()
        return max(sizes)

    assert together(2, kept) == [2 * 4 * WIDTH] * 2
