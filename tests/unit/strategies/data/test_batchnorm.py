"""Synchronised BatchNorm on parts is torch's BatchNorm on the whole batch."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from shoal.model.gathering import Asking, Gathered, Nobody, Question
from shoal.model.recompute import recompute_blocks
from shoal.strategies.data.batchnorm import batchnorm_layers, synchronise

SHAPES = {1: (nn.BatchNorm1d, (12, 5)), 2: (nn.BatchNorm2d, (12, 5, 3, 4)), 3: (nn.BatchNorm3d, (12, 5, 2, 3, 2))}
SIZES = [5, 1, 6]
STEPS = 3
GUARD_S = 30


class Slots:
    """Threads that bring each other vectors, and how many numbers the first of them has brought."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=GUARD_S)
        self._given: dict[int, torch.Tensor] = {}
        self.sent = 0

    def of(self, rank: int) -> Asking:
        def ask(values: torch.Tensor, question: Question) -> Gathered:
            assert values.dtype == torch.float64 and question is Question.SUMS
            if rank == 0:
                self.sent += values.numel()
            self._given[rank] = values
            self._barrier.wait()
            parts = [self._given[key].clone() for key in sorted(self._given)]
            self._barrier.wait()
            return Gathered(parts, rank)

        return Asking(ask)


def numbers_brought(module: nn.Module) -> int:
    """In one forward and backward pass: sums and a count, deviations, two sums of gradients."""
    return sum(4 * layer.num_features + 1 for layer in batchnorm_layers(module))


def _run_parts(replicas: list[nn.Module], parts: list[torch.Tensor], slopes: list[torch.Tensor]) -> list:
    """Forward and backward of every part in a thread of its own; returns outputs and input gradients."""
    results: list = [None] * len(parts)

    def work(rank: int) -> None:
        x = parts[rank].clone().requires_grad_()
        output = replicas[rank](x)
        output.backward(slopes[rank])
        results[rank] = (output.detach(), x.grad)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.0, "eps": 0.1}],
    ids=str,
)
def test_as_torch_on_the_whole_batch(dims: int, options: dict) -> None:
    torch.manual_seed(dims)
    make, shape = SHAPES[dims]
    whole = make(5, **options).double()
    if whole.affine:
        nn.init.normal_(whole.weight), nn.init.normal_(whole.bias)
    slots = Slots(len(SIZES))
    replicas = [copy.deepcopy(whole) for _ in SIZES]
    for rank, replica in enumerate(replicas):
        synchronise(replica, slots.of(rank))
    for _ in range(STEPS):
        x = (torch.randn(shape, dtype=torch.float64) * 3 + 7).requires_grad_()
        slope = torch.randn(shape, dtype=torch.float64)
        expected = whole(x)
        expected.backward(slope)
        results = _run_parts(replicas, list(x.detach().split(SIZES)), list(slope.split(SIZES)))
        torch.testing.assert_close(torch.cat([output for output, _ in results]), expected.detach())
        torch.testing.assert_close(torch.cat([gradient for _, gradient in results]), x.grad)
    for name, param in whole.named_parameters():
        torch.testing.assert_close(sum(dict(r.named_parameters())[name].grad for r in replicas), param.grad)
    for replica in replicas:
        torch.testing.assert_close(dict(replica.named_buffers()), dict(whole.named_buffers()))
    assert slots.sent == STEPS * numbers_brought(whole)


def _blocks() -> nn.Module:
    """Three blocks: two that are alike, and the sequence beside them."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)), nn.Tanh())

    return nn.Sequential(
        nn.Sequential(block(), block()),
        nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5), nn.BatchNorm1d(5)),
    ).double()


def test_a_pass_that_is_repeated_exchanges_nothing_again() -> None:
    """Blocks are computed twice, statistics are exchanged and moved once: as torch does with the whole batch."""
    torch.manual_seed(0)
    whole, calls = _blocks(), list[int]()
    replicas = [copy.deepcopy(whole) for _ in SIZES]
    slots = Slots(len(SIZES))
    for rank, replica in enumerate(replicas):
        assert recompute_blocks(replica) == 3
        synchronise(replica, slots.of(rank))
    replicas[0][0][0][0][0].register_forward_hook(lambda *_: calls.append(1))
    for _ in range(STEPS):
        x = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
        slope = torch.randn(12, 5, dtype=torch.float64)
        expected = whole(x)
        expected.backward(slope)
        results = _run_parts(replicas, list(x.detach().split(SIZES)), list(slope.split(SIZES)))
        torch.testing.assert_close(torch.cat([output for output, _ in results]), expected.detach())
        torch.testing.assert_close(torch.cat([gradient for _, gradient in results]), x.grad)
    assert len(calls) == 2 * STEPS
    assert slots.sent == STEPS * numbers_brought(whole)
    for replica in replicas:
        torch.testing.assert_close(dict(replica.named_buffers()), dict(whole.named_buffers()))


def test_a_shifted_mean_does_not_drown_the_variance() -> None:
    """In float32 the difference of large sums would lose it."""
    layer = nn.BatchNorm1d(2)
    synchronise(layer, Asking(Nobody()))
    x = torch.randn(64, 2) + 3000.0
    expected = (x.double() - x.double().mean(0)) / x.double().var(0, correction=0).sqrt()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_half_precision_are_computed_in_float32(dtype: torch.dtype) -> None:
    """A sum of squares of these would be infinite in float16, and a mean of 40 off by an eighth in bfloat16."""
    plain = nn.BatchNorm2d(2)
    layer = copy.deepcopy(plain)
    synchronise(layer, Asking(Nobody()))
    x = (torch.randn(32, 2, 16, 16) * 30 + 40).to(dtype)
    found, expected = layer(x), plain(x)
    assert found.dtype == expected.dtype == dtype
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(layer.running_var, plain.running_var)


def test_evaluation_is_torchs_own() -> None:
    plain = nn.BatchNorm1d(3)
    plain.running_mean.fill_(2.0)
    layer = copy.deepcopy(plain)
    synchronise(layer, Asking(lambda values, question: pytest.fail("evaluation asks nobody")))
    x = torch.randn(4, 3)
    assert torch.equal(layer.eval()(x), plain.eval()(x))


def test_every_layer_of_a_model_is_found() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16)))
    assert [layer.num_features for layer in batchnorm_layers(model)] == [4, 16]
