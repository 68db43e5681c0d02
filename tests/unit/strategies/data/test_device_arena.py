"""Processes that share a device's memory: the host's stands for it here, and kills are exceptions."""

from __future__ import annotations

import math
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

from helpers.host_driver import HostDriver
from shoal.arena.shelf import FdShelf
from shoal.errors import SpecError
from shoal.feed.parts import LoadedBatch, Part
from shoal.model.replica import Replica
from shoal.spec import Cluster, Data, Task, World
from shoal.step.work import Work
from shoal.strategies.base import Company, Extent, Setting
from shoal.strategies.data.device_arena import DeviceArenaData
from shoal.strategies.data.device_update import Aside, DeviceUpdate
from shoal.strategies.data.turns import GpuTurns
from shoal.strategies.data.update import ChunkUpdate

BATCH, SLOTS, STEPS = 12, 3, 6
INPUTS = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(4))
TARGETS = torch.arange(BATCH) % 3
OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
}


class Killed(BaseException):
    """The process is gone: nothing after this is done."""


def with_spare(has_norm: bool) -> nn.Module:
    """One layer is never used, so that no slot touches it."""
    layers = [nn.Linear(4, 9), nn.BatchNorm1d(9) if has_norm else nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 3)]
    model = nn.Sequential(*layers)
    model[0].extra = nn.Linear(2, 2)
    return model


@dataclass
class Host:
    """What outlives processes."""

    arena_fd: int
    shelf: FdShelf

    @classmethod
    def make(cls) -> Host:
        return cls(os.memfd_create("shoal-arena"), FdShelf.make())

    def close(self) -> None:
        os.close(self.arena_fd)
        self.shelf.close()


@dataclass
class Process:
    """One process with all places of a run of two workers."""

    strategy: DeviceArenaData
    replica: Replica
    setting: Setting

    @classmethod
    def open(
        cls,
        host: Host,
        optimizer: str = "AdamW",
        *,
        role: str = "worker",
        has_norm: bool = False,
        journal: bool = True,
    ) -> Process:
        task = Task(
            model=lambda: with_spare(has_norm),
            loss=F.cross_entropy,
            optimizer=OPTIMIZERS.get(optimizer, torch.optim.Adafactor),
            train=TensorDataset(INPUTS, TARGETS),
            clip_norm=1.0,
        )
        spec = Data(via="arena", journal=journal)
        places = (0, 1) if role == "worker" else ()
        world = World(role=role, world_size=2, places=places, arena_fd=host.arena_fd, shelf_fds=host.shelf.fds)
        setting = Setting(
            world=world,
            conduct=spec.conduct(Cluster(workers=2), SLOTS),
            extent=Extent(total_steps=STEPS, batch_size=BATCH, tables=2, table_rows=2, table_columns=2),
            clip_norm=task.clip_norm,
            company=Company(report=lambda line: None),
        )
        process = cls(DeviceArenaData(spec, HostDriver), Replica(task), setting)
        process.strategy.open(process.replica, setting)
        process.replica.train_mode()
        return process

    def step(self, number: int) -> float:
        parts = tuple(Part(slot, rows(slot), float(BATCH)) for slot in range(SLOTS))
        return self.strategy.take(Work(number, parts, 7)).result().loss

    def found(self) -> dict[str, list[float]]:
        streams = (self.strategy.model_stream(self.replica), self.strategy.state_stream())
        return {name: value.tolist() for stream in streams for name, value in stream.tensors}


def rows(slot: int) -> Callable[[], Iterator[LoadedBatch]]:
    first, last = BATCH * slot // SLOTS, BATCH * (slot + 1) // SLOTS
    return lambda: iter([((INPUTS[first:last], TARGETS[first:last]), float(last - first), last - first)])


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    made = [Host.make() for _ in range(2)]
    yield made
    for host in made:
        host.close()


def dies_in(kind: type, name: str, *, after: int = 0) -> Callable[[Process, int], None]:
    """When a method is called for the time after so many, before it does anything."""

    def die(process: Process, step: int) -> None:
        plain, calls = getattr(kind, name), []

        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) > after:
                raise Killed
            return plain(*args, **kwargs)

        with patch.object(kind, name, called), pytest.raises(Killed):
            process.step(step)

    return die


def tears_the_model(process: Process, step: int) -> None:
    def tear(*_: Any) -> None:
        for param in process.replica.trained.values():
            param.data.view(-1)[0] = 99.0
        raise Killed

    with patch.object(ChunkUpdate, "apply", tear), pytest.raises(Killed):
        process.step(step)


def updates_and_says_nothing(process: Process, step: int) -> None:
    with patch.object(DeviceArenaData, "_finish", side_effect=Killed), pytest.raises(Killed):
        process.step(step)


def tears_the_shadow(process: Process, step: int) -> None:
    def tear(aside: Aside) -> None:
        for _, room in aside._pairs:
            room.view(torch.uint8).fill_(255)
        raise Killed

    with patch.object(Aside, "save", tear), pytest.raises(Killed):
        process.step(step)


DEATHS = {
    "before anything": lambda process, step: None,
    "between slots": dies_in(DeviceArenaData, "_ask", after=1),
    "before the update": dies_in(DeviceUpdate, "run"),
    "in the shadow": tears_the_shadow,
    "before the host's copy": dies_in(Aside, "save", after=1),
    "in the update": tears_the_model,
    "after the update": updates_and_says_nothing,
    "before the end": dies_in(DeviceArenaData, "_commit"),
}


@pytest.mark.parametrize("die", DEATHS.values(), ids=DEATHS)
@pytest.mark.parametrize(
    ("optimizer", "has_norm"), [("momentum", False), ("AdamW", False), ("AdamW", True), ("Adagrad", False)]
)
def test_a_successor_finishes_what_was_begun(
    optimizer: str, has_norm: bool, die: Callable[[Process, int], None], hosts: list[Host]
) -> None:
    calm, process = (Process.open(host, optimizer, has_norm=has_norm) for host in hosts)
    losses = [calm.step(number) for number in range(1, STEPS + 1)]
    first = 2 if optimizer == "momentum" else 1  # the first step makes the state
    for number in range(1, first):
        process.step(number)
    for number in (first, 3, 4):
        while process.strategy.committed() < number - 1:
            process.step(process.strategy.committed() + 1)
        die(process, number)
        process = Process.open(hosts[1], optimizer, role="spare", has_norm=has_norm)
        assert process.strategy.reform(process.setting.world.hosting((0, 1), number)) == number - 1
        assert process.step(number) == losses[number - 1]
    assert [process.step(number) for number in (5, 6)] == losses[4:]
    assert process.found() == calm.found()


def test_what_the_first_worker_left_before_it_opened_is_made_by_its_successor(hosts: list[Host]) -> None:
    with patch.object(DeviceArenaData, "_host", side_effect=Killed), pytest.raises(Killed):
        Process.open(hosts[0])
    heir = Process.open(hosts[0], role="spare")
    assert heir.strategy.reform(heir.setting.world.hosting((0, 1), 1)) == 0
    assert heir.step(1) == Process.open(hosts[1]).step(1)


def test_without_a_journal_the_bits_are_the_same(hosts: list[Host]) -> None:
    one, other = Process.open(hosts[0]), Process.open(hosts[1], journal=False)
    for number in range(1, STEPS + 1):
        assert one.step(number) == other.step(number)
    assert one.found() == other.found()


def test_an_optimizer_of_whole_tensors_is_refused(hosts: list[Host]) -> None:
    with pytest.raises(SpecError, match=r"Adafactor.*element by element.*via=backend"):
        Process.open(hosts[0], "Adafactor")


def test_processes_that_nobody_gave_a_shelf_are_refused(hosts: list[Host]) -> None:
    hosts[0].shelf, shelf = FdShelf.make(), hosts[0].shelf
    with patch.object(FdShelf, "fds", ()), pytest.raises(Exception, match="started otherwise"):
        Process.open(hosts[0])
    shelf.close()


@pytest.mark.parametrize(("waiting_s", "are_taken"), [(0.02, True), (0.0002, False)])
def test_turns_are_for_devices_that_are_busy(waiting_s: float, are_taken: bool) -> None:
    turns = GpuTurns()
    for _ in range(3):
        turns.note(5.0, 0.0)  # something was compiled
    for _ in range(9):
        assert turns.are_taken or not are_taken
        turns.note(0.01, waiting_s)
    assert turns.are_taken == are_taken


def test_the_next_process_is_told_a_little_before_its_turn() -> None:
    turns = GpuTurns()
    for waiting_s in (0.030, 0.025):
        turns.note(0.01, waiting_s)
        assert turns.soon_s == math.inf  # until it is done
    turns.note(0.01, 0.020)
    assert 0.015 < turns.soon_s < 0.020
    turns.note(0.01, 0.0001)
    assert turns.soon_s == 0.0
