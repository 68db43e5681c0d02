"""One suite for whoever runs a slot's passes: the same sums, gradients and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.errors import Diverged
from shoal.feed.parts import LoadedBatch, Part
from shoal.model.replica import Replica
from shoal.spec import Task
from shoal.step.compiled import CompiledCompute
from shoal.step.compute import SAMPLES, Compute, DeferredSums, EagerCompute, Sums
from shoal.step.work import Work

COMPUTES: dict[str, Callable[[Replica], Compute]] = {
    "eager": EagerCompute,
    # All of it but the compiler: what that makes is tried in tests of whole runs.
    "compiled": lambda replica: CompiledCompute(replica, backend="aot_eager"),
}
GENERATOR = torch.Generator().manual_seed(1)
INPUTS, TARGETS = torch.randn(8, 3, generator=GENERATOR), torch.randn(8, 2, generator=GENERATOR)


def task(**changes: Any) -> Task:
    usual: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)),
        "loss": F.mse_loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "train": TensorDataset(INPUTS, TARGETS),
    }
    return Task(**(usual | changes))


def part(*weights: float, total: float | None = None, slot: int = 0) -> Part:
    """Two samples for each weight."""

    def load() -> Iterator[LoadedBatch]:
        for number, weight in enumerate(weights):
            rows = slice(2 * number, 2 * number + 2)
            yield (INPUTS[rows], TARGETS[rows]), weight, 2

    return Part(slot, load, total)


# What compiles leaves threads behind, and others fork this process: it stays out of the runs that must be quick.
@pytest.fixture(params=["eager", pytest.param("compiled", marks=pytest.mark.long)])
def make(request: pytest.FixtureRequest) -> Callable[[Replica], Compute]:
    return COMPUTES[request.param]


def gradients(replica: Replica) -> list[torch.Tensor]:
    return [param.grad.clone() for param in replica.trained.values() if param.grad is not None]


def test_sums_and_gradients_are_those_of_the_weighted_losses(make: Callable[[Replica], Compute]) -> None:
    replica = Replica(task(model=lambda: nn.Linear(3, 2)))
    found = make(replica).run(Work(1, (), 0), part(1.0, 0.0, 3.0)).resolve()
    losses = [F.mse_loss(replica.module(INPUTS[i : i + 2]), TARGETS[i : i + 2]).item() for i in (0, 4)]
    assert found == Sums(losses[0] + 3 * losses[1], 4.0, samples=6)
    own = gradients(replica)
    replica.module.zero_grad()
    weighted = [F.mse_loss(replica.module(INPUTS[i : i + 2]), TARGETS[i : i + 2]) for i in (0, 4)]
    (weighted[0] + 3 * weighted[1]).backward()
    for gradient, expected in zip(own, gradients(replica), strict=True):
        torch.testing.assert_close(gradient, expected)


def test_random_numbers_follow_from_seed_step_and_slot(make: Callable[[Replica], Compute]) -> None:
    def loss(step: int, slot: int) -> float:
        replica = Replica(task())
        replica.train_mode()
        torch.manual_seed(step * 100 + slot)  # whatever else was drawn before
        return make(replica).run(Work(step, (), 5), part(1.0, slot=slot)).resolve().loss

    assert loss(1, 0) == loss(1, 0) and loss(1, 0) != loss(2, 0) and loss(1, 0) != loss(1, 1)


def test_a_loss_that_is_no_number_is_refused_at_last_when_it_is_asked_for(
    make: Callable[[Replica], Compute],
) -> None:
    replica = Replica(task(loss=lambda output, target: output.sum() * math.nan))
    with pytest.raises(Diverged, match="the loss is nan at step 3"):
        make(replica).run(Work(3, (), 0), part(1.0)).resolve()


def test_what_is_learnt_gives_no_gradient(make: Callable[[Replica], Compute]) -> None:
    replica = Replica(task(skip_loss_below=1e9))
    found = make(replica).run(Work(1, (), 0), part(2.0)).resolve()
    assert (found.weight, found.skipped, found.skipped_parts) == (0.0, 2.0, 1.0) and not gradients(replica)


def told(output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    """A loss, and what it is made of: a tensor with a history, and a plain number."""
    error, size = F.mse_loss(output, target), output.square().mean()
    return {"loss": error + 0.5 * size, "error": error, "size": size.item()}


def test_a_loss_may_be_told_with_other_numbers(make: Callable[[Replica], Compute]) -> None:
    replica = Replica(task(model=lambda: nn.Linear(3, 2), loss=told))
    found = make(replica).run(Work(1, (), 0), part(1.0, 0.0, 3.0)).resolve()
    with torch.no_grad():
        expected = [told(replica.module(INPUTS[i : i + 2]), TARGETS[i : i + 2]) for i in (0, 4)]
    assert replica.loss_parts.names == ("error", "size")
    assert found.loss == pytest.approx(float(expected[0]["loss"] + 3 * expected[1]["loss"]))
    assert found.parts == pytest.approx([float(expected[0][n] + 3 * expected[1][n]) for n in ("error", "size")])
    assert found.loss == pytest.approx(found.parts[0] + 0.5 * found.parts[1])
    assert Sums.of(found.values).values == found.values and found.values[SAMPLES] == found.samples


def test_what_is_learnt_is_told_all_the_same(make: Callable[[Replica], Compute]) -> None:
    replica = Replica(task(skip_loss_below=1e9, loss=told))
    found = make(replica).run(Work(1, (), 0), part(2.0)).resolve()
    assert found.weight == 0.0 and found.loss == pytest.approx(found.parts[0] + 0.5 * found.parts[1])


def test_sums_may_be_known_later() -> None:
    found = DeferredSums(Work(1, (), 0), part(1.0))
    found.add(Sums(samples=4))
    found.defer(torch.tensor(0.5), 2.0)
    found.defer(torch.tensor([0.25]), 4.0)
    assert found.resolve() == found.resolve() == Sums(2.0, 6.0, samples=4)
    other = DeferredSums(Work(1, (), 0), part(1.0))
    other.defer(torch.tensor(0.5), 2.0, (torch.tensor([0.25], requires_grad=True), 3.0))
    other.defer(torch.tensor(0.5), 1.0, (0.25, 1.0))
    assert other.resolve() == Sums(1.5, 3.0, parts=(0.75, 7.0))
    found.defer(torch.tensor(math.inf), 1.0)
    with pytest.raises(Diverged):
        found.resolve()
