"""How a worker gets the newest parameters: all at once, or each part of the model just before it computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from shoal.comm.compression import Compression
from shoal.errors import ProtocolError
from shoal.model.buffers import MovingBuffers
from shoal.ps.messages import Values
from shoal.ps.worker import WorkerMachine
from shoal.strategies.ps.memory import ServedMemory, shaped
from shoal.strategies.ps.moving import KEEPER
from shoal.strategies.ps.parcelling import unwrap
from shoal.strategies.ps.served import Served, pull_compression, works_on_the_whole
from shoal.strategies.ps.snapshot import whole_state
from shoal.strategies.ps.units import FetchOnUse, FetchUnit
from shoal.strategies.ps.whole_store import pulled_state

_TRIES_BEFORE_LOOKING = 1000
"""A block changes for about a millisecond; one that stays odd was left so by a server that died."""
Taken = TypeVar("Taken")
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
        self._pull_whole()
        return whole_state(self._served.memory, names, [0 for _ in self._shards])

    def fetch_exactly(self) -> None:
        """Renew everything now, with every bit that the servers have, where pulls are rounded."""
        self.fetch()
        if self.is_rounded and not works_on_the_whole(self._served.spec, self._served.replica):
            self._pull_whole()
            for shard in self._shards:
                self._framed.take_whole(shard)

    @property
    def is_rounded(self) -> bool:
        """Whether parameters come with fewer bits than the servers have."""
        return not self._served.shares_memory and pull_compression(self._served.spec).lossy

    def _pull_whole(self) -> None:
        """Have all of every shard, optimizer state included, where a first copy of it would lie."""
        for shard in self._shards:
            self._machine.pull(shard, time.monotonic(), whole=True)
        for shard in self._shards:
            self._wait(partial(self._has_come, shard))
            self._framed.unpack_whole(shard, self._machine.pulled(shard) or [])

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


class OwnValues:
    """Private memory under the replica's parameters, laid out as the servers' is."""

    def __init__(self, memory: ServedMemory, moving: MovingBuffers) -> None:
        self._moving = moving
        own = torch.zeros(memory.grid.nbytes, dtype=torch.uint8, device=memory.params[0].device)
        for view, param in zip(shaped(own, memory.grid.offsets, memory.params), memory.params, strict=True):
            view.copy_(param.data)
            param.data = view
        self.blocks = [
            [
                own[block.chunk.offset : block.chunk.offset + block.chunk.nbytes].view(
                    memory.params[block.chunk.pieces[0].param].dtype
                )
                for block in blocks
            ]
            for blocks in memory.blocks
        ]
        """By shard and block."""

    def take_moving(self, committed: torch.Tensor) -> None:
        """Adopt the committed moving buffers."""
        if self._moving.nbytes:
            self._moving.own.copy_(committed)


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """What a worker has heard of the shards in the segment."""

    copy_of: Callable[[int], int]
    """The copy of a shard that counts."""
    updates_of: Callable[[int], int]
    """How many updates of it were told: that copy has seen them all."""
    hear: Callable[[], None]
    """Takes in the news that another copy counts now."""


class SharedFetch:
    """Copies blocks out of the segment; a version that changed meanwhile means: copy again.

    A copy whose holder died is taken by a new backup, who fills it anew. A worker that has not heard of it sees
    that this copy lacks updates which it was told of, and reads nothing there.
    """

    def __init__(self, memory: ServedMemory, own: OwnValues, whereabouts: Whereabouts) -> None:
        self._memory = memory
        self._own = own
        self._whereabouts = whereabouts
        self._versions = [memory.versions(copy) for copy in range(memory.copies)]
        self._updates = [memory.updates(copy) for copy in range(memory.copies)]
        self._sources: dict[tuple[int, int], list[tuple[int, torch.Tensor, torch.Tensor]]] = {}

    def fetch_block(self, shard: int, position: int) -> None:
        """One block of a shard, from the copy that counts."""
        tries = 0
        while True:
            copy = self._whereabouts.copy_of(shard)
            number, source, target = self._blocks(shard, copy)[position]
            version = self._versions[copy][number]
            if not version & 1 and self._is_whole(shard, copy):
                target.copy_(source)
                if self._versions[copy][number] == version and self._is_whole(shard, copy):
                    return
            tries += 1
            if tries % _TRIES_BEFORE_LOOKING == 0:
                self._whereabouts.hear()

    def read(self, shards: Sequence[int], take: Callable[[list[int]], Taken]) -> Taken:
        """What `take` reads of shards that nobody updates now; it is given the copies that count."""
        while True:
            copies = [self._whereabouts.copy_of(shard) for shard in shards]
            if all(map(self._is_whole, shards, copies)):
                taken = take(copies)
                if all(map(self._is_whole, shards, copies)):
                    return taken
            self._whereabouts.hear()

    def updates(self, shard: int) -> int:
        """How many updates a shard's values have seen."""
        return int(self._updates[self._whereabouts.copy_of(shard)][shard])

    def take_moving(self) -> None:
        """Adopt the committed moving buffers."""
        self.read([KEEPER], lambda copies: self._own.take_moving(self._memory.moving(copies[0])))

    def _is_whole(self, shard: int, copy: int) -> bool:
        """Whether a copy has all updates that were told of; one that is filled anew has none."""
        return bool(self._updates[copy][shard] >= self._whereabouts.updates_of(shard))

    def _blocks(self, shard: int, copy: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Number, source and target of each block."""
        if (shard, copy) not in self._sources:
            home, params = self._memory.home(copy), self._memory.params
            self._sources[shard, copy] = [
                (block.number, home.flat("params", block.chunk, params[block.chunk.pieces[0].param].dtype), target)
                for block, target in zip(self._memory.blocks[shard], self._own.blocks[shard], strict=True)
            ]
        return self._sources[shard, copy]


class FramedFetch:
    """Unpacks values that servers sent."""

    def __init__(self, memory: ServedMemory, own: OwnValues, compression: Compression) -> None:
        self._memory = memory
        self._own = own
        self._compression = compression
        self._moving = memory.moving(0)

    def unpack(self, shard: int, parts: Sequence[Values]) -> int:
        """Take a shard's values out of the messages that brought them; how many updates they have seen."""
        frames = [frame for part in parts for frame in part.frames]
        if shard == KEEPER:
            moving = frames.pop()
            if not isinstance(moving, torch.Tensor) or moving.shape != self._moving.shape:
                raise ProtocolError("The moving buffers that came with a pull do not fit the model.")
            self._own.take_moving(moving)
        targets = self._own.blocks[shard]
        if targets and targets[0].is_cuda:  # what came is read by the processor
            read = [torch.empty(target.shape, dtype=target.dtype, pin_memory=True) for target in targets]
            unwrap(self._compression, frames, read)
            torch._foreach_copy_(targets, read)
        else:
            unwrap(self._compression, frames, targets)
        return parts[0].version

    def unpack_whole(self, shard: int, parts: Sequence[Values]) -> None:
        """Keep all of a shard, optimizer state included, where a first copy of it would lie."""
        targets = self._memory.live(shard, 0)
        sources = [frame for part in parts for frame in part.frames][: len(targets)]
        if len(sources) != len(targets):
            raise ProtocolError("What a server sent of a shard does not fit it.")
        for source, target in zip(sources, targets, strict=True):
            if not isinstance(source, torch.Tensor) or (source.dtype, source.shape) != (
                target.dtype,
                target.shape,
            ):
                raise ProtocolError("What a server sent of a shard does not fit it.")
            target.copy_(source)

    def take_whole(self, shard: int) -> None:
        """Take the values of a shard that was kept whole."""
        home, params = self._memory.home(0), self._memory.params
        for block, target in zip(self._memory.blocks[shard], self._own.blocks[shard], strict=True):
            target.copy_(home.flat("params", block.chunk, params[block.chunk.pieces[0].param].dtype))
