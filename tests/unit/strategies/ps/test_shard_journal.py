"""A server is killed at every store of its journal's words, and inside updates; another goes on from there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from shoal.errors import LaunchError
from shoal.model.optimizer.chunk import ChunkOptimizer
from shoal.model.replica import Replica
from shoal.ps.buffers import BUFFERS_PER_SLOT
from shoal.ps.messages import COORDINATOR, Ack, Control, PsMessage, Push, ShardView, View, shard_rows
from shoal.ps.server import ServerMachine
from shoal.spec import ParameterServer, Task, World
from shoal.strategies.ps import blocks
from shoal.strategies.ps import journal as journals
from shoal.strategies.ps.served import Served
from shoal.strategies.ps.store import ShardStore

WORKERS, STEPS, WORKER_NODES = 2, 3, 10


class Killed(BaseException):
    """The process is gone: nothing after this is done."""


@dataclass
class Fate:
    """When the server is killed: before or after one of its stores, counted from 1; 0: never."""

    at: int = 0
    after: bool = False
    stores: int = 0
    torn: int = 0
    """Deaths with a block half changed."""


class FatefulWords:
    """The journal's words, the last thing that a killed server wrote."""

    def __init__(self, words: memoryview, fate: Fate) -> None:
        self._words = words
        self._fate = fate

    def __getitem__(self, index: int) -> int:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._fate.stores += 1
        strikes = self._fate.stores == self._fate.at
        if strikes and not self._fate.after:
            raise Killed
        self._words[index] = value
        if strikes:
            raise Killed


def make_task(optimizer: str = "adamw", *, by_loss: bool = False, clip: float | None = None) -> Task:
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
        "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    }
    schedule = torch.optim.lr_scheduler
    return Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.BatchNorm1d(50)),
        loss=torch.nn.functional.mse_loss,
        optimizer=makers[optimizer],
        scheduler=lambda it: (
            schedule.ReduceLROnPlateau(it, patience=0) if by_loss else schedule.StepLR(it, step_size=1, gamma=0.9)
        ),
        train=[0],
        batch_size=WORKERS,
        epochs=1,
        clip_norm=clip,
    )


@dataclass
class Host:
    """A host's memory, its workers' pushes by hand, and one server after another."""

    spec: ParameterServer
    task: Task
    fate: Fate = field(default_factory=Fate)
    deaths: int = 0
    acked: set[tuple[int, int]] = field(default_factory=set)
    """Origin and sequence of what was acknowledged."""

    def __post_init__(self) -> None:
        self._fd = os.memfd_create("host")
        self._generation = 0
        self.start()

    def close(self) -> None:
        os.close(self._fd)

    def start(self) -> None:
        """A server, told that it is the primary of all shards."""
        self._generation += 1
        torch.manual_seed(3)
        world = World(role="server", global_rank=0, arena_fd=self._fd)
        self.served = Served.open(self.spec, Replica(self.task), world, slots=WORKERS, workers=WORKERS)
        self.machine = ServerMachine(
            node=1, number=0, address="", rules=self.served.rules, make_values=self._make_values, now=0.0
        )
        holders = ShardView(generation=self._generation, primary=1)
        view = View(
            term=1,
            number=self._generation,
            shards=shard_rows([holders] * len(self.served.placement.shards)),
            addresses={},
            workers={rank: WORKER_NODES + rank for rank in range(WORKERS)},
            settings={},
        )
        self._survive(lambda: self.machine.on_message(COORDINATOR, view, 0.0))

    def _make_values(self, shard: int, copy: int) -> ShardStore:
        values = self.served.make_values(shard, copy)
        assert values.journal is not None
        values.journal._words = FatefulWords(values.journal._words, self.fate)  # type: ignore[assignment]
        return values

    def say(self, sender: int, make: Callable[[int, int], PsMessage], is_done: Callable[[], bool]) -> None:
        """Say something to all shards, in their present generation, until it is done; servers may die over it."""
        for _ in range(3):
            for shard in range(len(self.served.placement.shards)):
                message = make(shard, self._generation)
                self._survive(lambda m=message: self.machine.on_message(sender, m, 0.0))  # type: ignore[misc]
            self._hear()
            if is_done():
                return
        raise AssertionError("nobody answered")

    def _survive(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Killed:
            self.deaths += 1
            self.start()

    def _hear(self) -> None:
        for node, message in self.machine.outbox:
            if isinstance(message, Ack):
                self.acked.add((message.shard, node * 1000 + message.sequence))
        self.machine.outbox.clear()

    def push(self, rank: int, step: int) -> None:
        """A worker's push of a step, from a buffer that it has filled."""
        buffer = BUFFERS_PER_SLOT * rank + step % 2
        memory, node = self.served.memory, WORKER_NODES + rank
        dice = torch.Generator().manual_seed(100 * step + rank)
        for view in memory.views(f"gradients/{buffer}"):
            view.copy_(torch.randn(view.shape, generator=dice))
        memory.touched(buffer).fill_(1)
        moved = memory.moved(buffer).view(torch.uint8)
        moved.copy_(torch.full((moved.numel() // 4,), float(step + rank)).view(torch.uint8)[: moved.numel()])

        def message(shard: int, generation: int) -> Push:
            return Push(
                shard=shard,
                generation=generation,
                origin=node,
                sequence=step,
                clock_of=rank,
                clock=step,
                cells=[(step - 1) * WORKERS + rank],
                based_on=0,
                weight=1.0,
                loss=float(step % 3),
                buffer=buffer,
            )

        def is_acked() -> bool:
            return all(
                (shard, node * 1000 + step) in self.acked for shard in range(len(self.served.placement.shards))
            )

        self.say(node, message, is_acked)

    def control(self, number: int, action: str) -> None:
        def message(shard: int, generation: int) -> Control:
            return Control(shard=shard, term=1, number=number, action=action, values={})

        def is_obeyed() -> bool:
            duties = self.machine.held.values()
            return all(duty.shard is not None and duty.shard.control == number for duty in duties)

        self.say(COORDINATOR, message, is_obeyed)

    def train(self) -> list[Any]:
        """Every worker's steps, a mark and a way back to it; what all shards are in the end."""
        for step in range(1, STEPS + 1):
            for rank in range(WORKERS):
                self.push(rank, step)
            self._spoil_what_is_free(step)
            if not self.spec.is_lockstep and step == 1:
                self.control(1, "mark")
            if not self.spec.is_lockstep and step == 2:
                self.control(2, "rollback")
        found = []
        for duty in self.machine.held.values():
            assert duty.shard is not None
            _, books = duty.shard.books()
            found.append((duty.shard.values.digest(), books))
        return found

    def _spoil_what_is_free(self, step: int) -> None:
        """Who was told may write again where it pushed from; in lockstep, where it pushed from the time before."""
        for rank in range(WORKERS):
            buffer = BUFFERS_PER_SLOT * rank + (step - 1 if self.spec.is_lockstep else step) % 2
            for view in self.served.memory.views(f"gradients/{buffer}"):
                view.fill_(float("nan"))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CHUNK_BYTES", 1024)


@pytest.fixture
def torn_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fate]:
    """An optimizer's step may end in the middle: half of the block is changed, in no meaningful way."""
    fate, step = Fate(), ChunkOptimizer.step

    def dying_step(self: ChunkOptimizer) -> bool:
        fate.stores += 1
        if fate.stores == fate.at:
            for tensor in self.live:
                tensor.view(torch.uint8)[: tensor.numel() * tensor.element_size() // 2] = 77
            fate.torn += 1
            raise Killed
        return step(self)

    monkeypatch.setattr(ChunkOptimizer, "step", dying_step)
    yield fate


LONG = pytest.mark.long
CASES = [
    ("bsp", "adamw", {"clip": 0.5}),
    ("asp", "momentum", {"by_loss": True}),
    pytest.param("bsp", "momentum", {}, marks=LONG),
    pytest.param("asp", "adamw", {}, marks=LONG),
    pytest.param("quorum:1/2", "momentum", {}, marks=LONG),
    pytest.param("alternate:1", "adamw", {}, marks=LONG),
    pytest.param("ssp:1", "momentum", {}, marks=LONG),
]


def train(sync: str, task: Task, fate: Fate | None = None, **keys: Any) -> tuple[list[Any], Host]:
    host = Host(ParameterServer(sync=sync, shards="2", **keys), task, fate or Fate())
    try:
        return host.train(), host
    finally:
        host.close()


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=LONG)])
@pytest.mark.parametrize(("sync", "optimizer", "task"), CASES)
def test_a_death_at_a_store_changes_nothing(sync: str, optimizer: str, task: dict[str, Any], every: int) -> None:
    calm, host = train(sync, make_task(optimizer, **task))
    assert host.deaths == 0 and host.fate.stores >= 30
    for at in range(1, host.fate.stores + 1, every):
        found, struck = train(sync, make_task(optimizer, **task), Fate(at=at, after=bool(at % 2)))
        assert struck.deaths == 1
        assert found == calm, f"death at store {at}"


@pytest.mark.parametrize(("sync", "optimizer", "task"), CASES)
def test_a_death_inside_every_step_changes_nothing(
    sync: str, optimizer: str, task: dict[str, Any], torn_steps: Fate
) -> None:
    calm, _ = train(sync, make_task(optimizer, **task))
    num_steps = torn_steps.stores
    assert num_steps >= 2 * STEPS
    for at in range(1, num_steps + 1):
        torn_steps.at, torn_steps.stores, torn_steps.torn = at, 0, 0
        found, struck = train(sync, make_task(optimizer, **task))
        assert (struck.deaths, torn_steps.torn) == (1, 1)
        assert found == calm, f"death inside step {at}"


def test_parameters_that_are_averaged_outlive_their_server() -> None:
    calm, host = train("asp", make_task(), push="parameters")
    for at in range(1, host.fate.stores + 1, 2):
        found, struck = train("asp", make_task(), Fate(at=at, after=bool(at % 4 == 1)), push="parameters")
        assert struck.deaths == 1
        assert found == calm, f"death at store {at}"


def test_a_journal_that_is_full_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    calm, _ = train("asp", make_task())
    monkeypatch.setattr(journals, "MOST_ENTRIES", 2)
    _, host = train("asp", make_task())
    for at in range(1, host.fate.stores + 1, 2):
        found, struck = train("asp", make_task(), Fate(at=at, after=bool(at % 4 == 1)))
        assert struck.deaths == 1
        assert found == calm, f"death at store {at}"


def test_without_saved_blocks_a_death_inside_an_update_is_the_end(torn_steps: Fate) -> None:
    calm, _ = train("asp", make_task(), journal=False)
    torn_steps.at, torn_steps.stores = torn_steps.stores, 0
    with pytest.raises(LaunchError, match="in the middle of an update, and journal=off"):
        train("asp", make_task(), journal=False)
    assert torn_steps.torn == 1
    torn_steps.at = 0
    found, struck = train("asp", make_task(), Fate(at=3), journal=False)  # The first entry is about to be noted.
    assert struck.deaths == 1 and found == calm


def test_nobody_goes_on_with_a_place_that_has_no_journal() -> None:
    host = Host(ParameterServer(sync="asp"), make_task())
    host.push(0, 1)
    journal = host.served.make_values(0, 0).journal
    assert journal is not None
    journal.give_up()
    with pytest.raises(LaunchError, match="Nobody has all of shard 0"):
        host.start()
    host.close()
