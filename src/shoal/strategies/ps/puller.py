"""How a worker gets the newest parameters: all at once, or each part of the model just before it computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from shoal.ps.worker import WorkerMachine
from shoal.strategies.ps.fetch import FramedFetch, OwnValues, SharedFetch, Whereabouts
from shoal.strategies.ps.moving import KEEPER
from shoal.strategies.ps.served import Served, pull_compression, works_on_the_whole
from shoal.strategies.ps.snapshot import whole_state
from shoal.strategies.ps.units import FetchOnUse, FetchUnit
from shoal.strategies.ps.whole_store import pulled_state

Wait = Callable[[Callable[[], bool]], None]
"""Hears the news until something has come true."""


class Puller:
    """The worker's own copy of the parameters, and the ways to renew it. `hear` takes in a little news."""

    def __init__(self, served: Served, machine: WorkerMachine, wait: Wait, hear: Callable[[], None]) -> None:
        self._served = served
        self._machine = machine
        self._wait = wait
        own = OwnValues(served.memory, served.moving)
        whereabouts = Whereabouts(
            copy_of=self._copy_of, updates_of=lambda shard: machine.links[shard].version, hear=hear
        )
        self._shared = SharedFetch(served.memory, own, whereabouts)
        self._framed = FramedFetch(served.memory, own, pull_compression(served.spec))
        self._shards = range(len(machine.links))
        self._on_use: FetchOnUse | None = None
        self._clock = 0
        self._pending: set[int] = set()
        """Shards that were asked for and have not been unpacked."""
        self.based_on = [0 for _ in self._shards]
        """By shard: the version that the parameters have."""

    def fetch_on_use(self, units: list[FetchUnit]) -> None:
        """From now on, fetch each unit's parameters before it computes."""
        self._on_use = FetchOnUse(units, self._ensure)

    def begin(self, clock: int) -> None:
        """A step begins: renew everything, or let each part be renewed when its turn comes."""
        self._clock = clock
        if self._on_use is None:
            self._wait(lambda: self._machine.may_start(clock))
            self.fetch()
            return
        self._on_use.expire()
        if self._served.shares_memory:
            self._renew_moving()
        else:
            self._wait(lambda: self._machine.may_start(clock))
            self._ask()

    def fetch(self) -> None:
        """Renew everything now, first layers first."""
        if self._on_use is not None:
            self._on_use.settle()
        if not self._served.shares_memory:
            self._ask()
        for shard in self._shards:
            self._take(shard)
        if self._served.shares_memory:
            self._renew_moving()

    def snapshot(self) -> dict[str, torch.Tensor]:
        """The optimizer's state by whole-parameter names, as the servers have it."""
        names = list(self._served.replica.trained)
        if works_on_the_whole(self._served.spec, self._served.replica):
            return self._state_of_the_whole()
        if self._served.shares_memory:
            return self._shared.read(self._shards, partial(whole_state, self._served.memory, names))
        for shard in self._shards:
            self._machine.pull(shard, time.monotonic(), whole=True)
        for shard in self._shards:
            self._wait(partial(self._has_come, shard))
            self._framed.unpack_whole(shard, self._machine.pulled(shard) or [])
        return whole_state(self._served.memory, names, [0 for _ in self._shards])

    def _state_of_the_whole(self) -> dict[str, torch.Tensor]:
        """The same where one server runs the task's own optimizer, and has its state to itself."""
        (shard,) = self._shards
        self._machine.pull(shard, time.monotonic(), whole=True)
        self._wait(partial(self._has_come, shard))
        frames = [frame for part in self._machine.pulled(shard) or [] for frame in part.frames]
        return pulled_state(frames, self._served.replica)

    def close(self) -> None:
        """Fetch nothing more."""
        if self._on_use is not None:
            self._on_use.close()

    def _ensure(self, unit: FetchUnit) -> None:
        """Before a unit computes: its shards may be read, and its blocks are fetched."""
        for shard in unit.shards:
            self._wait(lambda shard=shard: self._machine.may_start(self._clock, shard))  # type: ignore[misc]
            self.based_on[shard] = self._shared.updates(shard)
            if not self._served.shares_memory:
                self._take(shard)
        if self._served.shares_memory:
            for shard, position in unit.blocks:
                self._shared.fetch_block(shard, position)

    def _take(self, shard: int) -> None:
        """All of a shard."""
        if self._served.shares_memory:
            self.based_on[shard] = self._shared.updates(shard)
            for position in range(len(self._served.memory.blocks[shard])):
                self._shared.fetch_block(shard, position)
        elif shard in self._pending:
            self._pending.discard(shard)
            self._wait(partial(self._has_come, shard))
            self.based_on[shard] = self._framed.unpack(shard, self._machine.pulled(shard) or [])

    def _ask(self) -> None:
        for shard in self._shards:
            self._machine.pull(shard, time.monotonic())
        self._pending = set(self._shards)

    def _renew_moving(self) -> None:
        if self._served.moving.nbytes:
            self._wait(lambda: self._machine.may_start(self._clock, KEEPER))
            self._shared.take_moving()

    def _has_come(self, shard: int) -> bool:
        return self._machine.pulled(shard) is not None

    def _copy_of(self, shard: int) -> int:
        holders = self._machine.links[shard].holders
        assert holders is not None
        return holders.copy if self._served.host is None else self._served.host
