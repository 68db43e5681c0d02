"""A worker of a served job: waits for its turn, fetches the parameters, pushes what it computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shoal.comm.codec import Frame
from shoal.comm.compression import make_compression
from shoal.comm.security import RunKey
from shoal.comm.zmq_wire import ZmqWire
from shoal.ps.leasing import LeaseHolder
from shoal.ps.node import Node
from shoal.ps.worker import WorkerMachine
from shoal.spec import World
from shoal.spec.update_path import cells_ahead
from shoal.strategies.data.direct import leave, write_directly
from shoal.strategies.data.tap import GradientTap
from shoal.strategies.ps.bulk import frames_of
from shoal.strategies.ps.fetch import FramedFetch, OwnValues, SharedFetch
from shoal.strategies.ps.memory import BUFFERS_PER_SLOT, BUFFERS_PER_TURN, TURNS, Label
from shoal.strategies.ps.served import Served, pull_compression
from shoal.strategies.ps.snapshot import whole_state

_BIND_ADDRESS = "tcp://127.0.0.1:*"
_TICK_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What a worker computed on some cells."""

    clock: int
    cells: Sequence[int]
    place: int
    """The buffer that holds it."""
    weight: float
    loss: float
    scaled: bool
    is_inherited: bool = False
    """Another worker, now dead, has left it in memory."""


class PsClient:
    """The worker's end of the parameter server. `on_idle` is called while it waits, and raises to give up."""

    def __init__(self, served: Served, world: World, on_idle: Callable[[], None]) -> None:
        self.served = served
        self._on_idle = on_idle
        wire = ZmqWire(_BIND_ADDRESS, key=RunKey.from_text(world.secret))
        now = time.monotonic()
        self.machine = WorkerMachine(
            node=world.node,
            rank=world.global_rank,
            num_shards=len(served.placement.shards),
            consistency=served.consistency,
            now=now,
            address=wire.address,
            leases=LeaseHolder(now=now, ahead=cells_ahead(served.spec)) if served.spec.is_leased else None,
        )
        self._node = Node(world.node, self.machine, wire, f"tcp://{world.coordinator}")
        self._own = OwnValues(served.memory, served.moving)
        self._shared = SharedFetch(served.memory, self._own)
        self._framed = FramedFetch(served.memory, self._own, pull_compression(served.spec))
        self.compression = make_compression(served.spec.compress)
        self.tap = GradientTap(served.memory.params)
        self._direct = write_directly(served.replica.module, served.memory.params, self.tap)
        self._views: dict[int, list[torch.Tensor]] = {}
        self._in_use: dict[int, int] = {}
        """By buffer: the push whose gradient it holds."""
        self._based_on = [0] * len(self.machine.links)
        self._turn = world.generation % TURNS
        """How often this rank has been replaced decides which of its slots' buffers are its own."""
        self._replaces = world.generation > 0
        self._first_clock = 1

    def join(self) -> int:
        """Become a member; returns the first clock that is this worker's to do."""
        self._wait(lambda: self.machine.is_ready)
        links = self.machine.links
        if self.served.consistency.gathers(rounds := min(link.rounds for link in links) + 1):
            self._first_clock = rounds
        else:
            self._first_clock = self.machine.completed + 1
        return self._first_clock

    def inherited(self, clock: int, cell: int, slot: int) -> Contribution | None:
        """What the worker that this one replaces had made of a cell, if it came so far.

        Some shards may have it and others not; all must get the same.
        """
        if not self._replaces or clock != self._first_clock or not self.served.shares_memory:
            return None
        for place in range(BUFFERS_PER_SLOT * slot, BUFFERS_PER_SLOT * (slot + 1)):
            label = self.served.memory.label(place)
            if (label.clock, label.cell) == (clock, cell):
                return Contribution(
                    clock=clock,
                    cells=[cell],
                    place=place,
                    weight=label.weight,
                    loss=label.loss,
                    scaled=label.scaled,
                    is_inherited=True,
                )
        return None

    def begin(self, clock: int) -> None:
        """Wait until consistency lets this step begin, then bring the replica to the newest parameters."""
        ahead = self.served.spec.ahead
        self._wait(lambda: self.machine.may_start(clock) and self.machine.outstanding <= ahead)
        self.fetch()

    def await_round(self, clock: int) -> None:
        """Wait until the round of this clock is closed on every shard."""
        self._wait(lambda: all(link.rounds >= clock for link in self.machine.links))

    def fetch(self) -> None:
        """Bring the replica to the newest parameters, first layers first."""
        shards = range(len(self.machine.links))
        if self.served.shares_memory:
            for shard in shards:
                self._based_on[shard] = self._shared.fetch(shard, self._copy_of(shard), partial(self._look, shard))
            return
        for shard in shards:
            self.machine.pull(shard, time.monotonic())
        for shard in shards:
            self._wait(partial(self._has_come, shard))
            self._based_on[shard] = self._framed.unpack(shard, self.machine.pulled(shard) or [])

    def snapshot(self) -> dict[str, torch.Tensor]:
        """The optimizer's state by whole-parameter names, as the servers have it."""
        shards = range(len(self.machine.links))
        names = list(self.served.replica.trained)
        if self.served.shares_memory:
            return whole_state(self.served.memory, names, [self._copy_of(shard) for shard in shards])
        for shard in shards:
            self.machine.pull(shard, time.monotonic(), whole=True)
        for shard in shards:
            self._wait(partial(self._has_come, shard))
            self._framed.unpack_whole(shard, self.machine.pulled(shard) or [])
        return whole_state(self.served.memory, names, [0 for _ in shards])

    def take_cells(self, count: int) -> list[int] | None:
        """The next cells of the data, fewer at the end; None when all of it has been trained on.

        An empty list where none can be had now, but others must not wait for this rank: a matter for `tick`.
        """
        leases, cells = self.machine.leases, list[int]()
        assert leases is not None
        patient_until = time.monotonic() + _TICK_S

        def is_decided() -> bool:
            while len(cells) < count and (cell := leases.take(time.monotonic())) is not None:
                cells.append(cell)
            is_awaited = self.machine.consistency.waits and time.monotonic() >= patient_until
            return len(cells) == count or leases.is_over or (leases.is_dry and (bool(cells) or is_awaited))

        self._wait(is_decided)
        self._node.pump(0.0)
        return None if leases.is_over and not cells else cells

    def tick(self, clock: int) -> None:
        """Take a step without data."""
        self._wait(lambda: self.machine.may_start(clock))
        shards = len(self.machine.links)
        self.machine.push(
            clock=clock,
            cells=[],
            based_on=[0] * shards,
            weight=0.0,
            loss=0.0,
            frames=[()] * shards,
            now=time.monotonic(),
        )

    def aim(self, slot: int, clock: int) -> int:
        """Let gradients go to a buffer of this slot that no server reads any more; its number."""
        place = BUFFERS_PER_SLOT * slot + BUFFERS_PER_TURN * self._turn + clock % BUFFERS_PER_TURN
        if (sequence := self._in_use.get(place)) is not None:
            self._wait(lambda: self.machine.is_released(sequence))
        self.tap.aim(self.views(place), self.served.memory.touched(place).numpy())
        return place

    def views(self, place: int) -> list[torch.Tensor]:
        """A buffer of gradients, by parameter."""
        if place not in self._views:
            self._views[place] = self.served.memory.views(f"gradients/{place}")
        return self._views[place]

    def offer_parameters(self, slot: int, clock: int) -> int:
        """Put this worker's own parameters where a gradient would go; the buffer's number."""
        place = self.aim(slot, clock)
        self.served.memory.touched(place).fill_(1)
        for view, param in zip(self._views[place], self.served.memory.params, strict=True):
            view.copy_(param.data)
        return place

    def push(self, made: Contribution) -> None:
        """Push what was computed; it is kept until every shard has acknowledged it."""
        if not made.is_inherited:
            moved = self.served.moving.gather()
            if self.served.moving.nbytes:
                self.served.memory.moved(made.place).copy_(moved)
            label = Label(made.clock, made.cells[0], made.weight, made.loss, made.scaled)
            self.served.memory.put_label(made.place, label)
        sequence = self.machine.push(
            clock=made.clock,
            cells=made.cells,
            based_on=self._based_on,
            weight=made.weight,
            loss=made.loss,
            scaled=made.scaled,
            place=made.place,
            frames=self._frames(made.place),
            now=time.monotonic(),
        )
        self._in_use[made.place] = sequence
        self._node.pump(0.0)

    def finish(self) -> None:
        """Wait until everything pushed is safe."""
        self._wait(lambda: self.machine.outstanding == 0)

    def await_all(self, clock: int) -> None:
        """Wait until every rank has come this far on every shard."""
        if self.served.consistency.gathers(clock):
            self.await_round(clock)
        else:
            self._wait(lambda: all(link.floor >= clock for link in self.machine.links))

    @property
    def is_told_to_stop(self) -> bool:
        """Whether the worker that evaluates has found that training may end."""
        return "stop" in self.settings

    def ask_to_stop(self, reason: str) -> None:
        """Let all workers end, and wait until that is decided."""
        self.machine.facts["stop"] = reason
        self._wait(lambda: self.is_told_to_stop)

    @property
    def settings(self) -> dict[str, Any]:
        """What the coordinator has adjusted."""
        return {} if self.machine.view is None else self.machine.view.settings

    def pause(self, seconds: float) -> None:
        """Do nothing but hear the news for a while."""
        until = time.monotonic() + seconds
        self._wait(lambda: time.monotonic() >= until)

    def hear(self, seconds: float) -> None:
        """Take in news, waiting so long for them at most."""
        self._node.pump(seconds)
        self._on_idle()

    def report(self, **facts: float) -> None:
        """What the coordinator is told several times a second."""
        self.machine.facts.update(facts)

    def close(self) -> None:
        """Leave; the replica keeps its last values."""
        self.tap.close()
        leave(self._direct)
        self.machine.say_done(time.monotonic())
        self._node.flush()
        self._node.close()

    def _frames(self, place: int) -> list[tuple[Frame, ...]]:
        """By shard: what a push carries; nothing where the servers read it from memory."""
        shards = range(len(self.machine.links))
        if self.served.shares_memory:
            return [() for _ in shards]
        return [frames_of(self.served.memory, shard, place, self.compression) for shard in shards]

    def _wait(self, is_done: Callable[[], bool]) -> None:
        self._node.wait(is_done, self._on_idle)

    def _has_come(self, shard: int) -> bool:
        return self.machine.pulled(shard) is not None

    def _copy_of(self, shard: int) -> int:
        holders = self.machine.links[shard].holders
        assert holders is not None
        return holders.copy

    def _look(self, shard: int) -> int:
        """Hear the news; which copy of a shard counts now."""
        self.hear(0.001)
        return self._copy_of(shard)
