"""Horovod's optimizer and layers train what one process would, in real processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal.horovod.torch as hvd
from helpers.horovod_worlds import among, each_size
from shoal.spec import World

STEPS = 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 5, generator=generator, dtype=torch.float64)


def alone(size: int, make_optimizer: Callable[[Any], torch.optim.Optimizer], passes: int = 1) -> nn.Module:
    """One process on everybody's batches."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            whole = torch.cat([batch(step * passes + part, rank) for rank in range(size)])
            model(whole).square().mean().backward()
        optimizer.step()
    return model


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "predivided": {"gradient_predivide_factor": 1.5},
    "groups": {"num_groups": 2},
    "accumulated": {"backward_passes_per_step": 3},
}


@each_size
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("make_optimizer", [sgd, pytest.param(adam, marks=pytest.mark.long)])
def test_steps_are_those_of_one_process(size, option, make_optimizer):
    passes = OPTIONS[option].get("backward_passes_per_step", 1)
    expected = alone(size, make_optimizer, passes).state_dict()

    def work() -> None:
        model = make_model()
        if hvd.rank():
            nn.init.zeros_(model[0].weight)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            make_optimizer(model.parameters()), named_parameters=model.named_parameters(), **OPTIONS[option]
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(passes):
                model(batch(step * passes + part, hvd.rank())).square().mean().backward()
            optimizer.step()
            schedule.step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)

    among(size, work)


def test_clipping_compression_and_what_only_one_rank_used():
    def work() -> list[float]:
        model = make_model()
        branch = nn.Linear(5, 3).double()
        nn.init.constant_(branch.weight, 0.1), nn.init.zeros_(branch.bias)
        params = [*model.parameters(), *branch.parameters()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), compression=hvd.Compression.fp16)
        inputs = batch(0, hvd.rank())
        outputs = model(inputs) + (branch(inputs) if hvd.rank() == 0 else 0)
        outputs.square().mean().backward()
        with pytest.raises(AssertionError, match="race condition"):
            optimizer.zero_grad()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(params, 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
        assert params[0].dtype == torch.float64 and params[0].grad.dtype == torch.float64
        return [float(norm), float(branch.weight.sum()), float(model[0].weight.sum())]

    first, second = among(2, work)
    assert first == second and first[1] != pytest.approx(1.5, abs=1e-9)


def test_an_optimizer_is_of_its_own_class_and_says_what_does_not_fit():
    hvd.init(world=World())
    try:
        model = make_model()
        wrapped = hvd.DistributedOptimizer(adam(model.parameters()), model.named_parameters())
        assert isinstance(wrapped, torch.optim.Adam) and type(wrapped).__name__ == "Adam"
        model(batch(0, 0)).sum().backward()
        with pytest.raises(AssertionError, match="backward_passes_per_step=1"):
            model(batch(0, 0)).sum().backward()
        wrapped.step()
        fresh = hvd.DistributedOptimizer(adam(make_model().parameters()))
        fresh.load_state_dict(copy.deepcopy(wrapped.state_dict()))
        assert fresh.state_dict()["state"][0]["step"] == 1
        names = [("a", param) for param in model.parameters()]
        with pytest.raises(ValueError, match="Found duplicates: a"):
            hvd.DistributedOptimizer(sgd(model.parameters()), names)
        with pytest.raises(ValueError, match="were not named"):
            hvd.DistributedOptimizer(sgd(model.parameters()), list(model.named_parameters())[1:])
        with pytest.raises(ValueError, match="sequence of tuples"):
            hvd.DistributedOptimizer(sgd(model.parameters()), model.parameters())
    finally:
        hvd.shutdown()


@each_size
def test_sparse_gradients_and_adasum(size):
    def work() -> None:
        rank = hvd.rank()
        table = nn.Embedding(8, 2, sparse=True)
        nn.init.zeros_(table.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), op=hvd.Sum)
        table(torch.tensor([0, rank + 1])).sum().backward()
        optimizer.step()
        expected = torch.zeros(8)
        expected[0], expected[1 : size + 1] = -size, -1
        assert torch.equal(table.weight[:, 0], expected) and torch.equal(table.weight[:, 1], expected)
        model = make_model()
        before = model[0].weight.detach().clone()
        combined = hvd.DistributedOptimizer(sgd(model.parameters()), op=hvd.Adasum)
        model(batch(0, 0)).square().mean().backward()  # the same everywhere, of which Adasum makes the mean
        gradient = model[0].weight.grad.clone()
        combined.step()
        torch.testing.assert_close(model[0].weight.detach(), before - 0.1 * gradient)

    among(size, work)


@each_size
def test_synchronised_batchnorm_is_that_of_the_whole_batch(size):
    def parts(rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(rank * 2 + 1, 3, 4, generator=generator, dtype=torch.float64)  # ranks differ in size

    def results(layer: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
        inputs = inputs.clone().requires_grad_()
        outputs = layer(inputs)
        (outputs * torch.arange(4.0, dtype=torch.float64) ** 2).square().sum().backward()
        assert inputs.grad is not None
        return outputs.detach(), inputs.grad

    whole = nn.BatchNorm1d(3).double()
    expected = results(whole, torch.cat([parts(rank) for rank in range(size)]))

    def work() -> None:
        rank = hvd.rank()
        layer = hvd.SyncBatchNorm(3).double()
        found = results(layer, parts(rank))
        rows = slice(rank * rank, (rank + 1) * (rank + 1))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs[rows], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(layer.running_mean, whole.running_mean)
        torch.testing.assert_close(layer.running_var, whole.running_var)
        total = hvd.allreduce(layer.weight.grad, op=hvd.Sum)
        torch.testing.assert_close(total, whole.weight.grad)
        layer.eval(), whole.eval()
        torch.testing.assert_close(layer(parts(0)), whole(parts(0)))

    among(size, work)
