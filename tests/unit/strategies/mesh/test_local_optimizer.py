"""The task's optimizer over what a worker of a mesh holds: parts, or whole parameters where it needs those."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.errors import SpecError
from shoal.model.replica import Replica
from shoal.model.start import Start
from shoal.spec import Task
from shoal.strategies.mesh.held import Held, HeldSpan
from shoal.strategies.mesh.local_optimizer import LocalOptimizer, group_numbers

AXES: Any = SimpleNamespace(shard=SimpleNamespace(index=0, size=2), tensor=SimpleNamespace(index=0, size=1))
STEPS = 4


class Slowing(torch.optim.Adafactor):
    """Changes a setting of its groups itself, and wants an argument that is no setting."""

    def __init__(self, params, lr: float, *, factor: float) -> None:
        super().__init__(params, lr=lr)
        self.factor = factor

    def step(self, closure=None):
        for group in self.param_groups:
            group["pace"] = group.get("pace", 1.0) * self.factor
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(group["pace"])
        return super().step(closure)


def make_task(optimizer) -> Task:
    return Task(
        model=lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)),
        loss=F.cross_entropy,
        optimizer=optimizer,
        scheduler=lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5),
        train=TensorDataset(torch.randn(4, 4), torch.zeros(4, dtype=torch.int64)),
    )


def gradient(name: str, param: torch.Tensor, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + len(name))
    return torch.randn(param.shape, generator=generator)


def held_by(replica: Replica, mine: set[str]) -> list[Held]:
    """Flat parts of a vector, as the shard axis cuts it: each parameter is one worker's."""
    found = []
    for name, param in replica.trained.items():
        size = param.numel()
        spans = (HeldSpan(0, size), HeldSpan(0, 0)) if name in mine else (HeldSpan(0, 0), HeldSpan(0, size))
        flat = param.detach().clone().view(-1)[: spans[0].stop]
        found.append(Held(name=name, tensor=flat, shape=param.shape, spans=spans))
    return found


def make_slowing(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Slowing([{"params": params[:2]}, {"params": params[2:], "lr": 0.05}], lr=0.1, factor=0.9)


def test_whole_parameters_are_updated_as_in_one_process() -> None:
    task, mine = make_task(make_slowing), {"0.weight", "1.bias"}
    alone, cut = Replica(task), Replica(task)
    held = held_by(cut, mine)
    own = LocalOptimizer(cut, group_numbers(cut), held, AXES)
    for step in range(1, STEPS + 1):
        for name, param in alone.trained.items():
            param.grad = gradient(name, param, step)
        alone.optimizer.step()
        alone.advance(0.0)
        for one in held:
            if one.name in mine:
                one.tensor.grad = gradient(one.name, alone.trained[one.name], step).view(-1)
        own.step()
        cut.advance(0.0)
    for one in held:
        assert one.tensor.numel() == 0 or torch.equal(one.tensor.view(one.shape), alone.trained[one.name])
    for one in (one for one in held if one.name in mine):
        kept = alone.optimizer.state[alone.trained[one.name]]
        for key, value in kept.items():
            assert torch.equal(own.value(key, one), value) and not own.is_cut(key)
    assert len(cut.optimizer.state) == len(mine), "who asks the task's own what is kept is told"


def test_it_goes_on_from_what_was_saved() -> None:
    task, mine = make_task(make_slowing), {"0.weight", "1.weight"}
    alone = Replica(task)
    for name, param in alone.trained.items():
        param.grad = gradient(name, param, 1)
    alone.optimizer.step()
    saved = {
        f"{name}/{key}": value.clone()
        for name, param in alone.trained.items()
        for key, value in alone.optimizer.state[param].items()
    }
    resumed = Replica(task, start=replace(Start(), optimizer=saved))
    held = held_by(resumed, mine)
    own = LocalOptimizer(resumed, group_numbers(resumed), held, AXES)
    for one in (one for one in held if one.name in mine):
        for key, value in alone.optimizer.state[alone.trained[one.name]].items():
            assert torch.equal(own.value(key, one), value)


def test_a_parameter_that_several_keep_is_refused_with_its_name() -> None:
    replica = Replica(make_task(make_slowing))
    held = held_by(replica, {"0.weight"})
    halves = (HeldSpan(0, 6), HeldSpan(6, 12))
    held[0] = replace(held[0], tensor=held[0].tensor[:6], spans=halves)
    with pytest.raises(SpecError, match=r"Slowing works on whole parameters, but several .* parts of '0.weight'"):
        LocalOptimizer(replica, group_numbers(replica), held, AXES)
    elements = Replica(make_task(lambda params: torch.optim.AdamW(params, lr=0.1)))
    LocalOptimizer(elements, group_numbers(elements), held, AXES)
