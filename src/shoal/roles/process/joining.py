"""How processes that somebody else started become fellows: with memory and a folder of sockets in common.

The first makes them and tells the others, in the segment that `shoal run` gave all of them, or else through a
store such as torchrun's. A process may make one Trainer after another: every meeting has its number.
"""

from __future__ import annotations

import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from shoal.arena import Segment, counter_bytes
from shoal.comm.socket_folder import SocketFolder
from shoal.errors import LaunchError, PeerLost, SpecError
from shoal.observe.wording import plural
from shoal.spec import World

_MOST_BYTES = 1024
"""Of what the first process says at a time."""
_LOOK_EVERY_S = 1.0
"""How often a process that waits asks a store who has left."""
_LINGER_S = 3 * _LOOK_EVERY_S
"""How long the one that keeps the store stays for others, who may yet have to see that it leaves."""
_PATIENCE = timedelta(days=1)
"""The first may have much to write before it speaks. One that died is noticed by whoever started all."""


class Fellows:
    """The processes of a world, as one of them sees the others."""

    def __init__(self, world: World, on_idle: Callable[[], None] | None = None) -> None:
        """`on_idle` is called now and then while waiting for others, where that can be; it raises to give up."""
        self._world = world
        self._on_idle = on_idle
        self._point = _meeting_point(world, on_idle)
        if self._point is not None:
            weakref.finalize(self, _leave_in, os.getpid(), self._point)  # a script may just end
        self._folder: SocketFolder | None = None
        self._descriptors: list[int] = []

    def gather(self) -> World:
        """The world with a fresh segment, and with a folder of sockets. Everybody calls this equally often."""
        if self._point is None:
            return replace(self._world, arena_fd=None, sockets=self._make_folder())
        segment = Segment()
        handle, _, sockets = self.hear_first(f"{segment.handle} {self._make_folder()}").partition(" ")
        if self._world.global_rank:
            segment.share_with(handle)
        self._descriptors.append(segment.detach())
        self.hear_first()  # until then the first keeps its descriptor, which the others look up
        return replace(self._world, arena_fd=self._descriptors[-1], sockets=sockets)

    def hear_first(self, text: str = "") -> str:
        """What the first process says, which it does once it comes here; `text` is its own. All call this."""
        return text if self._point is None else self._point.hear_first(text)

    def enter(self, step: int) -> None:
        """This process takes part in all steps up to this one."""
        if self._point is not None:
            self._point.entered = step

    def leave(self) -> None:
        """Tell the others that this process enters no more steps."""
        if self._point is not None:
            self._point.leave()

    def look_up(self) -> None:
        """While this process waits for others: raise where it waits for one that has left."""
        if self._on_idle is not None:
            self._on_idle()
        if self._point is not None:
            self._point.check_others()

    def _make_folder(self) -> str:
        if self._world.sockets or self._world.global_rank:
            return self._world.sockets
        if self._folder is None:
            self._folder = SocketFolder()
            weakref.finalize(self, _close_in, os.getpid(), self._folder)  # also where nobody says that it is over
        return self._folder.path

    def close(self) -> None:
        """Leave the others. What is mapped stays."""
        self.leave()
        while self._descriptors:
            os.close(self._descriptors.pop())
        if self._folder is not None:
            self._folder.close()


class GivenFellows(Fellows):
    """Those of a run with servers. All were given one segment and one folder, and so is whoever comes later in the
    place of another: nobody has to meet, nor could with one that has just come."""

    def __init__(self, world: World) -> None:
        super().__init__(replace(world, world_size=1, global_rank=0, places=()))
        self._given = world

    def gather(self) -> World:
        """What all have."""
        return self._given


def _close_in(pid: int, folder: SocketFolder) -> None:
    """What this process has forked may end before it does."""
    if os.getpid() == pid:
        folder.close()


def _leave_in(pid: int, point: MeetingPoint) -> None:
    if os.getpid() == pid:
        point.leave()


def _meeting_point(world: World, on_idle: Callable[[], None] | None) -> MeetingPoint | None:
    if world.world_size == 1:
        return None
    if world.local_size != world.world_size:
        raise LaunchError(
            f"This process is one of {world.local_size} on its host, but the world has {world.world_size}; a "
            "Trainer shares one host's memory, and so does a key-value store that starts its servers itself. "
            "Start all of them on one host, train a task with `shoal train --on`, or name servers of `shoal kv "
            "serve`."
        )
    if world.arena_fd is not None:
        return SegmentPoint(world, world.arena_fd, on_idle)
    return StorePoint(world)


class MeetingPoint(ABC):
    """Where all of a world come together, as often as they like, and see who has left."""

    def __init__(self, world: World) -> None:
        self._rank, self._size = world.global_rank, world.world_size
        self._number = 0
        """Of the last time that all came together here, which is the same for all."""
        self.entered = 0
        """The last step that this process takes part in, so far."""

    @abstractmethod
    def hear_first(self, text: str) -> str:
        """What the first process says; `text` is this one's. The first goes on once all others have heard it."""

    @abstractmethod
    def leave(self) -> None:
        """Tell the others that this process takes part in no later step than the one it has entered."""

    @abstractmethod
    def left_after(self, rank: int) -> int | None:
        """The last step of one that has left since all came together; None where it is there."""

    def check_others(self) -> None:
        """Raise where one has left before the step that this process is in, and would wait in without end."""
        for rank in range(self._size):
            last = None if rank == self._rank else self.left_after(rank)
            if last is not None and last < self.entered:
                raise PeerLost(
                    f"Worker {rank} ended after {plural(last, 'step')}, but worker {self._rank} is in step "
                    f"{self.entered} and waits for it; let all processes take equally many steps.",
                    peer=str(rank),
                )


class SegmentPoint(MeetingPoint):
    """In memory that all of them were given."""

    def __init__(self, world: World, given_fd: int, on_idle: Callable[[], None] | None) -> None:
        super().__init__(world)
        segment = Segment(given_fd)
        segment.reserve("counters", counter_bytes(1 + 3 * world.world_size))
        segment.reserve("words", _MOST_BYTES)
        segment.map()
        self._counters = segment.counters("counters", on_idle)
        self._words = segment.tensor("words", torch.uint8).numpy()
        self._said, size = 0, world.world_size
        self._heard, self._last, self._left_at = (range(1 + row * size, 1 + (row + 1) * size) for row in range(3))

    def hear_first(self, text: str) -> str:
        counters, own = self._counters, self._heard[self._rank]
        number = self._number = counters[own] + 1
        if self._rank == 0:
            self._words[:] = list(_cut(text).encode().ljust(_MOST_BYTES, b"\0"))
            counters.publish(self._said, number)
            counters.wait_all(self._heard[1:], number)
        else:
            counters.wait(self._said, number)
            text = self._words.tobytes().rstrip(b"\0").decode()
        counters.publish(own, number)
        return text

    def leave(self) -> None:
        counters, left_at = self._counters, self._left_at[self._rank]
        if counters[left_at] < self._number:  # else this process has left a later meeting, too
            counters[self._last[self._rank]] = self.entered
            counters[left_at] = self._number

    def left_after(self, rank: int) -> int | None:
        has_left = self._counters[self._left_at[rank]] == self._number
        return self._counters[self._last[rank]] if has_left else None


class StorePoint(MeetingPoint):
    """At a store of torch's."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._keeps_store = world.global_rank == 0 and not _has_agent()
        self._store = _connect_store(world, keeps_it=self._keeps_store)
        self._looked_at = 0.0

    def hear_first(self, text: str) -> str:
        number = self._number = self._store.add(f"meetings/{self._rank}", 1)
        if self._rank == 0:
            self._store.set(f"{number}/said", _cut(text))
            for rank in range(1, self._size):
                self._store.get(f"{number}/heard/{rank}")
        else:
            text = self._store.get(f"{number}/said").decode()
            self._store.set(f"{number}/heard/{self._rank}", "")
        return text

    def leave(self) -> None:
        with suppress(RuntimeError):  # the store may have ended before
            self._store.set(f"{self._number}/left/{self._rank}", str(self.entered))
            deadline = time.monotonic() + (_LINGER_S if self._keeps_store else 0)
            others = [f"{self._number}/left/{rank}" for rank in range(1, self._size)]
            while time.monotonic() < deadline and not self._store.check(others):
                time.sleep(0.02)

    def left_after(self, rank: int) -> int | None:
        with suppress(RuntimeError):
            if self._store.check([key := f"{self._number}/left/{rank}"]):
                return int(self._store.get(key))
        return None

    def check_others(self) -> None:
        if (now := time.monotonic()) - self._looked_at > _LOOK_EVERY_S:
            self._looked_at = now
            super().check_others()


def _cut(text: str) -> str:
    return text.encode()[:_MOST_BYTES].decode(errors="ignore")


def orphan_watch() -> Callable[[], None]:
    """While waiting for others: notice that whoever started us is gone, and nobody will end us."""
    parent = os.getppid()

    def look() -> None:
        if os.getppid() != parent:
            raise PeerLost(f"The process that started this one ({parent}) has ended, and perhaps others with it.")

    return look


def _has_agent() -> bool:
    """Whether who started all keeps the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect_store(world: World, *, keeps_it: bool) -> Any:
    from torch.distributed import PrefixStore, TCPStore

    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if address is None or not port.isdigit():
        raise SpecError(
            f"World: WORLD_SIZE={world.world_size}, but MASTER_ADDR and MASTER_PORT do not say where processes "
            "meet; start this script with torchrun or `shoal run`."
        )
    # Several stores of a process share one server: torch.distributed may have its own at the same address.
    store = TCPStore(address, int(port), is_master=keeps_it, multi_tenant=True)
    store.set_timeout(_PATIENCE)
    # What processes of an attempt before this one have said to each other is not ours.
    return PrefixStore(f"shoal/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
