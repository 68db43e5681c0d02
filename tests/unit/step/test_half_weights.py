"""Weights that are cast together: what comes out is what autocast makes of each by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.feed.parts import Part
from shoal.model.replica import Replica
from shoal.spec import StepForm, Task
from shoal.step.compute import EagerCompute, compute_of
from shoal.step.half_weights import half_weights
from shoal.step.work import Work


class Tied(nn.Module):
    """A layer that is used twice, one that asks for full precision, a norm, and an embedding that is the last
    layer's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.twice = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.exact = nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.twice(torch.relu(self.twice(self.words(words))))
        with torch.autocast(x.device.type, enabled=False):
            x = self.exact(x.float())
        return self.head(self.norm(x))


def gradients(*, together: bool, form: StepForm | None = None) -> dict[str, torch.Tensor]:
    task = Task(
        model=Tied,
        loss=lambda scores, target: F.cross_entropy(scores.float(), target),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=[0],
        batch_size=6,
    )
    replica = Replica(task, precision="bf16", form=form)
    compute = compute_of(replica)
    assert isinstance(compute, EagerCompute)
    if together:
        compute.halves = half_weights(replica)
    drawn = torch.Generator().manual_seed(3)
    batches = [(torch.randint(0, 16, (6,), generator=drawn), torch.randint(0, 16, (6,), generator=drawn))] * 2
    part = Part(0, lambda: iter([(batch, 6.0, 6) for batch in batches]), 12.0)
    compute.run(Work(1, (part,), 0), part).resolve()
    return {name: param.grad for name, param in replica.trained.items() if param.grad is not None}


def test_gradients_have_the_bits_of_autocast() -> None:
    plain, found = gradients(together=False), gradients(together=True)
    assert plain.keys() == found.keys() and len(found) == 7
    assert all(torch.equal(plain[name], found[name]) for name in plain)


@pytest.mark.long
def test_compiled_gradients_are_those_of_autocast_but_for_rounding() -> None:
    plain = gradients(together=False, form=StepForm(compile=True))
    found = gradients(together=True, form=StepForm(compile=True))
    for name in plain:  # compiled code rounds where it pleases
        torch.testing.assert_close(found[name], plain[name], rtol=3e-2, atol=1e-3)


def test_layers_that_somebody_looks_at_are_left_alone() -> None:
    task = Task(
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=[0],
        batch_size=6,
    )
    replica = Replica(task, precision="bf16")
    next(replica.module.parameters()).register_hook(lambda gradient: gradient)
    assert half_weights(replica) is not None
    first, second = replica.module.children()
    assert "forward" not in first.__dict__ and "forward" in second.__dict__
    assert half_weights(Replica(task)) is None
