"""One suite for the values of a shard: cut into blocks, or updated as a whole; in the host's memory, or apart."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from shoal.comm.codec import Message, decode, encode
from shoal.comm.compression import make_compression
from shoal.model.replica import Replica
from shoal.ps.contract import ShardValues
from shoal.ps.messages import Push
from shoal.spec import ParameterServer, Task, World
from shoal.strategies.ps.bulk import frames_of
from shoal.strategies.ps.served import Served
from shoal.strategies.ps.whole_store import pulled_state


class Own(torch.optim.Optimizer):
    """Keeps a list, a number and a narrow tensor, of which torch's own load would make something else."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["pace"] = group.get("pace", 1.0) * 0.9
            for param in (p for p in group["params"] if p.grad is not None):
                kept = self.state[param]
                kept["past"] = [*kept.get("past", []), param.grad.clone()][-2:]
                kept["steps"] = kept.get("steps", 0) + 1
                kept["narrow"] = (kept.get("narrow", 0.0) + param.grad).to(torch.bfloat16)
                param.sub_((sum(kept["past"]) + kept["narrow"]) / kept["steps"], alpha=group["lr"] * group["pace"])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "own": Own,
}


@dataclass
class Copy:
    """One copy of the only shard, in a process of its own."""

    served: Served
    values: Any

    @classmethod
    def make(cls, fd: int, number: int, optimizer: Callable[..., torch.optim.Optimizer], wire: str) -> Copy:
        task = Task(
            model=lambda: nn.Sequential(nn.Linear(12, 10), nn.BatchNorm1d(10), nn.Linear(10, 3)),
            loss=nn.functional.mse_loss,
            optimizer=optimizer,
            scheduler=lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
            train=[0],
        )
        served = Served.open(
            ParameterServer(wire=wire, shards=1, sync="asp"), Replica(task), World(arena_fd=fd), slots=1, workers=1
        )
        values: ShardValues = served.make_values(0, number)
        values.initialise()
        return cls(served, values)

    def push(self, step: int) -> Push:
        """A gradient of this step, in the first buffer or in frames."""
        generator, memory = torch.Generator().manual_seed(step), self.served.memory
        memory.touched(0).fill_(1)
        memory.moved(0).copy_(self.served.moving.gather())
        for view in memory.views("gradients/0"):
            view.copy_(torch.randn(view.shape, generator=generator))
        shares = self.served.shares_memory
        return Push(
            shard=0,
            generation=1,
            origin=9,
            sequence=step,
            clock_of=0,
            clock=step,
            cells=[step - 1],
            based_on=step - 1,
            weight=1.0,
            loss=1.0,
            frames=() if shares else frames_of(memory, 0, 0, make_compression("none")),
        )

    def update(self, push: Push) -> None:
        self.values.step([push], scale=0.5, lr_scale=1.0, loss=0.3, last=True)


@dataclass
class Pair:
    first: Copy
    second: Copy

    def update(self, *steps: int) -> None:
        """Both take the updates of these steps."""
        for step in steps:
            push = self.first.push(step)
            assert self.first.values.fits(push) and self.second.values.fits(push)
            for copy in (self.first, self.second):
                copy.update(push)

    @property
    def are_equal(self) -> bool:
        return bool(self.first.values.digest() == self.second.values.digest())


@pytest.fixture(params=[(name, wire) for name in OPTIMIZERS for wire in ("memory", "tcp")], ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    name, wire = request.param
    fd = os.memfd_create("shoal-arena")
    yield Pair(*(Copy.make(fd, number, OPTIMIZERS[name], wire) for number in range(2)))
    os.close(fd)


def test_the_same_updates_make_the_same_bits(pair: Pair) -> None:
    assert pair.are_equal, "all begin alike"
    before = pair.first.values.digest()
    pair.update(1, 2, 3)
    assert pair.are_equal and pair.first.values.digest() != before
    pair.first.update(pair.first.push(4))
    assert not pair.are_equal


def test_a_copy_that_is_filled_goes_on_with_the_same_bits(pair: Pair) -> None:
    for step in (1, 2, 3):
        pair.first.update(pair.first.push(step))
    frames, facts = pair.first.values.frames(), pair.first.values.facts()
    carried = decode([bytes(part) for part in encode(Message("fill", facts, frames))])
    pair.second.values.load(carried.frames, carried.fields)
    assert pair.are_equal
    pair.update(4, 5)
    assert pair.are_equal


def test_what_was_marked_comes_back(pair: Pair) -> None:
    assert not pair.first.values.rollback(), "nothing was marked"
    pair.update(1, 2)
    marked = pair.first.values.digest()
    for copy in (pair.first, pair.second):
        copy.values.mark()
    pair.update(3, 4)
    assert pair.first.values.digest() != marked
    assert pair.first.values.rollback() and pair.second.values.rollback()
    assert pair.are_equal and pair.first.values.digest() == marked
    pair.update(5)
    assert pair.are_equal


def test_an_update_that_is_not_made_changes_no_value(pair: Pair) -> None:
    pair.update(1)
    before, facts = pair.first.values.digest(), pair.first.values.facts()
    push = pair.first.push(2)
    for copy in (pair.first, pair.second):
        copy.values.skip([push], loss=0.2, last=True)
    assert pair.first.values.digest() == before
    assert pair.first.values.facts()["updates"] == facts["updates"] + 1
    pair.update(3)
    assert pair.are_equal


def test_a_gradient_of_another_model_does_not_fit(pair: Pair) -> None:
    push = pair.first.push(1)
    if push.frames:
        strange = Push(**{**vars(push), "frames": push.frames[:-1]})
        assert not pair.first.values.fits(strange)
    assert pair.first.values.fits(push)


def test_all_of_it_can_be_had_by_a_worker(pair: Pair) -> None:
    """For a checkpoint: what is not in the host's memory comes in frames."""
    pair.update(1, 2)
    (frames,) = pair.first.values.parts(whole=True)
    assert frames
    optimizer = pair.first.served.replica.optimizer
    if isinstance(optimizer, torch.optim.Adafactor):
        state = pulled_state(frames, pair.second.served.replica)
        assert {name.rpartition("/")[2] for name in state} == {"step", "row_var", "col_var", "variance"}
        weight = pair.first.served.replica.trained["0.weight"]
        assert torch.equal(state["0.weight/row_var"], optimizer.state[weight]["row_var"])
