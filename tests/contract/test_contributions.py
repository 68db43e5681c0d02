"""One suite for what a worker of a served job does with its cells: computes on them, and pushes once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.feed.parts import LoadedBatch, Part
from shoal.model.replica import Replica
from shoal.spec import Cluster, ParameterServer, Task, World, parse_strategy
from shoal.step.tap import GradientTap
from shoal.step.work import Work
from shoal.strategies.ps.contribution import Contribution
from shoal.strategies.ps.making import make_contribute
from shoal.strategies.ps.served import Served

BATCH, SLOTS, RATE = 12, 2, 0.5
INPUTS = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(4))
TARGETS = torch.arange(BATCH) % 3
TASK = Task(
    model=lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)),
    loss=F.cross_entropy,
    optimizer=lambda params: torch.optim.SGD(params, lr=RATE),
    train=TensorDataset(INPUTS, TARGETS),
    batch_size=BATCH,
)
WRITTEN = {
    "GradientMaker": "ps",
    "GradientMaker, on its own": "ps:sync=asp",
    "GradientMaker, by parts": "ps:sync=asp,overlap=on",
    "ParameterMaker": "ps:push=parameters",
    "GroupMaker": "ps:via=ring",
    "PoolMaker": "ps:sync=asp,pool=threads:2,count:2",
}


def rows(cell: int) -> tuple[torch.Tensor, torch.Tensor]:
    first = BATCH * cell // SLOTS
    return INPUTS[first : first + BATCH // SLOTS], TARGETS[first : first + BATCH // SLOTS]


def make_work(step: int, slots: range, *, apart: bool) -> Work:
    def part(slot: int) -> Part:
        def load() -> Iterator[LoadedBatch]:
            yield rows(slot), float(BATCH // SLOTS), BATCH // SLOTS

        return Part(slot, load, float(BATCH // SLOTS if apart else BATCH))

    return Work(step, tuple(map(part, slots)), 7)


@dataclass
class Client:
    """Keeps what is pushed."""

    served: Served
    pushed: list[Contribution] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    """Parameters whose gradient was complete before the push was."""

    def __post_init__(self) -> None:
        self.tap = GradientTap(self.served.memory.params)
        leases = SimpleNamespace(
            take=lambda now: None, is_over=True, is_dry=True, is_closed=lambda cells: len(cells) >= SLOTS
        )
        self.machine = SimpleNamespace(leases=leases, rank=0)
        self.scale = SimpleNamespace(measure=lambda buffer, cells: None)

    def inherited(self, clock: int, cell: int, slot: int) -> None:
        return None

    def aim(self, slot: int, clock: int) -> int:
        self.tap.aim(self.views(0), self.served.memory.touched(0).numpy())
        return 0

    def views(self, buffer: int) -> list[torch.Tensor]:
        return self.served.memory.views(f"gradients/{buffer}")

    def offer_parameters(self, slot: int, clock: int) -> int:
        for view, param in zip(self.views(0), self.served.memory.params, strict=True):
            view.copy_(param.data)
        return 0

    def push(self, made: Contribution) -> None:
        self.pushed.append(made)
        self.values = [view.clone() for view in self.views(made.buffer)]

    def open_push(self, made: Contribution) -> None:
        self._open = made

    def on_gradient(self, number: int) -> None:
        self.told.append(number)

    def complete_push(self) -> None:
        self.push(self._open)

    def hear(self, seconds: float) -> None:
        """No news."""


def lone_group(*_: Any) -> Any:
    """A group of one."""
    return SimpleNamespace(
        ranks=range(1),
        leads=lambda clock: True,
        add_up=lambda tensor: None,
        bring_together=lambda tensor, clock: None,
        close=lambda: None,
    )


CELLS = {name: [[0], [1], [0, 1]] for name in WRITTEN} | {
    "GradientMaker, by parts": [[0], [1]],  # of one cell each
    "GroupMaker": [[0, 1]],  # of all that is its group's
    "ParameterMaker": [[0], [1]],  # later ones are computed on what the first has made of the model
}


@pytest.fixture
def maker(request: pytest.FixtureRequest) -> Iterator[tuple[str, Callable[..., Any], Client]]:
    spec = parse_strategy(WRITTEN[request.param])
    assert isinstance(spec, ParameterServer)
    conduct = spec.conduct(Cluster(), SLOTS)
    served = Served.open(spec, Replica(TASK), World(), slots=conduct.slots, workers=1)
    client = Client(served)
    with patch("shoal.strategies.ps.making.PushGroup", lone_group):
        made = make_contribute(served, cast(Any, client), make_work, World())
    assert type(made).__name__ == request.param.partition(",")[0]
    yield request.param, made, client
    made.close()


def expected(cells: list[int]) -> tuple[list[torch.Tensor], float]:
    """The mean gradient over these cells, and the mean loss."""
    replica = Replica(TASK)
    inputs, target = (torch.cat(part) for part in zip(*map(rows, cells), strict=True))
    loss = F.cross_entropy(replica.module(inputs), target)
    loss.backward()
    return [cast(torch.Tensor, p.grad) for p in replica.trained.values()], loss.item()


@pytest.mark.parametrize(
    ("maker", "cells"), [(name, cells) for name in WRITTEN for cells in CELLS[name]], indirect=["maker"], ids=str
)
def test_cells_become_one_push(maker: tuple[str, Callable[..., Any], Client], cells: list[int]) -> None:
    name, contribute, client = maker
    computed = contribute(1, cells, 0)
    weight = float(len(cells) * BATCH // SLOTS)
    gradients, loss = expected(cells)
    (made,) = client.pushed
    assert sorted(made.cells) == sorted(computed.cells) == sorted(set(made.cells) | set(cells))
    assert (made.weight, computed.weight) == (weight, weight) and made.clock == 1
    assert made.loss / weight == computed.loss / weight == pytest.approx(loss, rel=1e-5)
    if name == "ParameterMaker":
        return
    # A push whose gradients are no mean yet is divided by its weight where it is applied.
    share = (weight / BATCH if name in ("GradientMaker", "GroupMaker") else 1.0) if made.scaled else weight
    for found, gradient in zip(client.values, gradients, strict=True):
        torch.testing.assert_close(found, gradient * share)


def test_parameters_are_pushed_after_steps_of_ones_own() -> None:
    spec = cast(ParameterServer, parse_strategy(WRITTEN["ParameterMaker"]))
    served = Served.open(spec, Replica(TASK), World(), slots=SLOTS, workers=1)
    client = Client(served)
    begun = [p.detach().clone() for p in served.memory.params]
    make_contribute(served, cast(Any, client), make_work, World())(1, [1], 0)
    gradients, _ = expected([1])
    for found, before, gradient in zip(client.values, begun, gradients, strict=True):
        torch.testing.assert_close(found, before - RATE * gradient)


def test_by_parts_each_gradient_goes_out_when_it_is_there() -> None:
    spec = cast(ParameterServer, parse_strategy(WRITTEN["GradientMaker, by parts"]))
    served = Served.open(spec, Replica(TASK), World(), slots=SLOTS, workers=1)
    client = Client(served)
    make_contribute(served, cast(Any, client), make_work, World())(1, [0], 0)
    assert sorted(client.told) == [0, 1, 2, 3] and client.told.index(2) < client.told.index(0), (
        "the last layers first"
    )
