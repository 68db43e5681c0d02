"""Whoever takes a place goes on where the one before it was killed, wherever that was, with the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.feed.parts import LoadedBatch, Part
from shoal.model.replica import Replica
from shoal.spec import Cluster, Task, World, parse_strategy
from shoal.step.work import Work
from shoal.strategies import make_strategy
from shoal.strategies.base import Company, Extent, Handover, Setting, StepResult, handover_of
from shoal.strategies.data.update import ChunkUpdate

BATCH, SLOTS, STEPS = 12, 2, 6
INPUTS = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(4))
TARGETS = torch.arange(BATCH) % 3
OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}
CASES = [("data:via=arena", name) for name in OPTIMIZERS] + [("data:via=arena,shares=speed", "momentum")]


class Killed(BaseException):
    """The process is gone: nothing after this is done."""


@dataclass
class Process:
    """One process with all places of a run; a second one on the same memory can follow it."""

    strategy: Any
    replica: Replica
    setting: Setting

    @classmethod
    def open(cls, case: tuple[str, str], fd: int, role: str = "worker") -> Process:
        written, optimizer = case
        task = Task(
            model=lambda: nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Dropout(0.3), nn.Linear(9, 3)),
            loss=F.cross_entropy,
            optimizer=OPTIMIZERS[optimizer],
            train=TensorDataset(INPUTS, TARGETS),
            clip_norm=1.0,
        )
        spec, world = parse_strategy(written), World(role=role, arena_fd=fd)
        setting = Setting(
            world=world,
            conduct=spec.conduct(Cluster(), SLOTS),
            extent=Extent(total_steps=STEPS, batch_size=BATCH, tables=2, table_rows=1, table_columns=2),
            clip_norm=task.clip_norm,
            company=Company(report=lambda line: None),
        )
        process = cls(make_strategy(spec, world, SLOTS, replaceable=True), Replica(task), setting)
        process.strategy.open(process.replica, setting)
        process.replica.train_mode()
        return process

    @property
    def handover(self) -> Handover:
        handover = handover_of(self.strategy)
        assert handover is not None
        return handover

    def step(self, number: int, **asked: bool) -> StepResult:
        parts = tuple(Part(slot, rows(slot), float(BATCH)) for slot in range(SLOTS))
        return self.strategy.take(Work(number, parts, 7, **asked)).result()

    def found(self) -> dict[str, list[float]]:
        """Model and state after the last step."""
        streams = (self.strategy.model_stream(self.replica), self.strategy.state_stream())
        return {name: value.tolist() for stream in streams for name, value in stream.tensors}


def rows(slot: int) -> Callable[[], Iterator[LoadedBatch]]:
    first, last = BATCH * slot // SLOTS, BATCH * (slot + 1) // SLOTS
    return lambda: iter([((INPUTS[first:last], TARGETS[first:last]), float(last - first), last - first)])


def between_steps(process: Process, step: int) -> None:
    """It has not begun."""


def in_a_slot(process: Process, step: int) -> None:
    """One slot's gradients are there, the next one's are not."""
    fill, filled = type(process.strategy)._fill, []

    def one(strategy: Any, work: Work, part: Part) -> None:
        if filled:
            raise Killed
        filled.append(part)
        fill(strategy, work, part)

    with patch.object(type(process.strategy), "_fill", one), pytest.raises(Killed):
        process.step(step)
    assert filled


def before_the_update(process: Process, step: int) -> None:
    """All gradients are there: the step is decided."""
    with (
        patch.object(type(process.strategy), "_update_place", side_effect=Killed),
        pytest.raises(Killed),
    ):
        process.step(step)


def inside_the_update(process: Process, step: int) -> None:
    """Parameters are half changed."""

    def tear(*_: Any) -> None:
        for param in process.replica.trained.values():
            param.data.view(-1)[0] = 99.0
        raise Killed

    optimizer = type(process.replica.optimizer)
    torn = (ChunkUpdate, "apply") if optimizer is not torch.optim.Adafactor else (optimizer, "step")
    with patch.object(*torn, tear), pytest.raises(Killed):
        process.step(step)


@pytest.fixture
def fds() -> Iterator[list[int]]:
    made = [os.memfd_create("shoal-arena") for _ in range(2)]
    yield made
    for fd in made:
        os.close(fd)


@pytest.mark.parametrize("die", [between_steps, in_a_slot, before_the_update, inside_the_update])
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_a_successor_finishes_what_was_begun(
    case: tuple[str, str], die: Callable[[Process, int], None], fds: list[int]
) -> None:
    calm, process = (Process.open(case, fd) for fd in fds)
    losses = [calm.step(number).loss for number in range(1, STEPS + 1)]
    for number in (1, 2):
        process.step(number)
    for number in (3, 4):
        die(process, number)
        process = Process.open(case, fds[1], role="spare")
        assert process.handover.reform(process.setting.world.hosting((0,), number)) == number - 1
        assert process.step(number).loss == losses[number - 1]
    assert [process.step(number).loss for number in (5, 6)] == losses[4:]
    assert process.found() == calm.found()


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_the_past_is_there_for_who_comes_late(case: tuple[str, str], fds: list[int]) -> None:
    process = Process.open(case, fds[0])
    losses = [process.step(number).loss for number in (1, 2)]
    losses.append(process.step(3, stop=True).loss)
    sizes = [process.handover.sizes(number) for number in (2, 3)]
    successor = Process.open(case, fds[0], role="spare")
    assert successor.handover.committed() == 3
    assert successor.handover.reform(successor.setting.world.hosting((0,), 1)) == 3
    assert successor.handover.losses(1, 3) == losses
    assert [successor.handover.sizes(number) for number in (2, 3)] == sizes
    past = successor.handover.past(1, 3)
    assert past.counts.tolist() == [[BATCH // SLOTS] * SLOTS] * 3
    assert past.was_stopped and (past.sizes is not None) == ("speed" in case[0])
    assert not successor.handover.past(1, 2).was_stopped


def test_a_table_that_was_filled_is_not_filled_again(fds: list[int]) -> None:
    case = CASES[0]
    process = Process.open(case, fds[0])
    process.step(1)
    process.strategy.exchange(1, (1, 2), lambda table, place: table[place].fill_(5.0))
    successor = Process.open(case, fds[0], role="spare")
    successor.handover.reform(successor.setting.world.hosting((0,), 1))
    found = successor.strategy.exchange(1, (1, 2), lambda table, place: pytest.fail("it was filled"))
    assert found.tolist() == [[5.0, 5.0]]
