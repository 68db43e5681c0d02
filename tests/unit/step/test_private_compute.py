"""Clipped sample by sample, noised once: what a loop over samples does, whoever fills which slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.errors import Diverged, SpecError, TaskError
from shoal.feed.parts import LoadedBatch, Part
from shoal.model.replica import Replica
from shoal.spec import Task
from shoal.step import private
from shoal.step.private import GaussianNoise, PrivateCompute
from shoal.step.work import Work

COUNT, CLIP = 12, 0.4
GENERATOR = torch.Generator().manual_seed(1)
INPUTS = torch.randn(COUNT, 3, generator=GENERATOR, dtype=torch.float64) * 3
TARGETS = torch.randint(0, 4, (COUNT,), generator=GENERATOR)


def replica(**changes: Any) -> Replica:
    usual: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)),
        "loss": F.cross_entropy,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "train": TensorDataset(INPUTS, TARGETS),
    }
    return Replica(Task(**(usual | changes)), numerics="float64")


def part(rows: slice = slice(None), *, slot: int = 0, pieces: int = 1, total: float = COUNT) -> Part:
    def load() -> Iterator[LoadedBatch]:
        for inputs, targets in zip(INPUTS[rows].chunk(pieces), TARGETS[rows].chunk(pieces), strict=True):
            if len(inputs):
                yield (inputs, targets), float(len(inputs)), len(inputs)

    return Part(slot, load, total)


def gradient(made: Replica, noise: float, *parts: Part, step: int = 3, clip: float = CLIP) -> torch.Tensor:
    compute = PrivateCompute(made, clip, GaussianNoise(noise, 9))
    made.module.zero_grad(set_to_none=True)
    for each in parts:
        compute.run(Work(step, parts, 0), each)
    return torch.cat([param.grad.flatten() for param in made.trained.values() if param.grad is not None])


def by_hand(made: Replica, rows: slice = slice(None), clip: float = CLIP) -> torch.Tensor:
    total = torch.zeros(sum(param.numel() for param in made.trained.values()), dtype=torch.float64)
    for x, y in zip(INPUTS[rows], TARGETS[rows], strict=True):
        made.module.zero_grad(set_to_none=True)
        F.cross_entropy(made.module(x[None]), y[None]).backward()
        own = torch.cat([param.grad.flatten() for param in made.trained.values() if param.grad is not None])
        total += own * min(1.0, clip / float(own.norm()))
    return total / COUNT


def test_each_sample_is_clipped_by_itself() -> None:
    made = replica()
    expected = by_hand(made)
    assert torch.allclose(gradient(made, 0.0, part()), expected, atol=1e-12)
    assert not torch.allclose(by_hand(made, clip=1e9), expected, atol=1e-3), "something was to be clipped"


@pytest.mark.parametrize("rows", [1, 5])
def test_how_many_are_computed_side_by_side_does_not_matter(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = replica()
    whole = gradient(made, 0.0, part())
    nbytes = sum(param.nbytes for param in made.trained.values())
    monkeypatch.setattr(private, "_AT_A_TIME_BYTES", rows * nbytes)
    assert torch.allclose(gradient(made, 0.0, part(pieces=2)), whole, atol=1e-12)


def test_noise_is_added_once_however_many_slots_there_are() -> None:
    made = replica()
    halves = part(slice(0, 7)), part(slice(7, None), slot=1)
    one, two = gradient(made, 2.0, part()), gradient(made, 2.0, *halves)
    clean = gradient(made, 0.0, part())
    assert torch.allclose(one, two, atol=1e-12)
    drawn = (one - clean) * COUNT
    assert 1.0 < float(drawn.std()) < 3.0
    assert not torch.allclose(one, gradient(made, 2.0, part(), step=4))
    assert torch.equal(gradient(made, 2.0, halves[1]), gradient(made, 0.0, halves[1]))


def test_a_step_that_drew_nobody_is_one_of_noise() -> None:
    made = replica()
    empty = part(slice(0, 0))
    compute = PrivateCompute(made, CLIP, GaussianNoise(1.0, 9))
    sums = compute.run(Work(3, (empty,), 0), empty).resolve()
    assert 0 < sums.weight < 1e-6 and sums.samples == 0 and sums.mean_loss == 0.0
    assert float(torch.cat([param.grad.flatten() for param in made.trained.values()]).norm()) > 0  # type: ignore[union-attr]


def test_losses_are_told_as_they_are_with_what_they_come_with() -> None:
    def objective(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return {"loss": loss, "twice": 2 * loss}

    made = replica(loss=None, objective=objective)
    compute = PrivateCompute(made, CLIP, GaussianNoise(1.0, 9))
    sums = compute.run(Work(3, (part(),), 0), part()).resolve()
    with torch.no_grad():
        expected = float(F.cross_entropy(made.module(INPUTS), TARGETS))
    assert sums.mean_loss == pytest.approx(expected) and sums.parts[0] == pytest.approx(2 * sums.loss)
    assert torch.allclose(gradient(made, 0.0, part()), by_hand(made), atol=1e-12)


def test_what_mixes_samples_is_refused_in_a_sentence() -> None:
    mixing = replica(model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    with pytest.raises(TaskError, match="BatchNorm1d"):
        PrivateCompute(mixing, CLIP, GaussianNoise(1.0, 9))
    with pytest.raises(SpecError, match="LBFGS"):
        PrivateCompute(replica(optimizer=torch.optim.LBFGS), CLIP, GaussianNoise(1.0, 9))

    class Asking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if float(x.sum()) > 0 else super().forward(-x)

    with pytest.raises(TaskError, match="vmap"):
        gradient(replica(model=lambda: Asking(3, 4)), 0.0, part())


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    with pytest.raises(Diverged):
        gradient(replica(loss=lambda found, target: F.cross_entropy(found, target) * torch.nan), 0.0, part())
    with pytest.raises(Diverged, match="gradient of a sample"):
        gradient(replica(loss=lambda found, target: (found - found.detach()).abs().sum().sqrt()), 0.0, part())
