"""How the workers of a run find each other: what each must know of the others is left where all of them look.

On one host that is the shared segment, which only processes of the run hold, so that the run's key may lie there,
too. Workers of several hosts leave it with their supervisor, and have the key from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from shoal.arena import Segment, counter_bytes
from shoal.spec.world import LOOPBACK
from shoal.strategies.base import Setting

if TYPE_CHECKING:
    from shoal.comm.security import RunKey

_ROW_BYTES = 256
_KEY_IS_THERE, _ADDRESS_IS_THERE = 1, 2


class Meeting(Protocol):
    """One worker's part in it: the key first, since a socket is bound with it, then the addresses."""

    def agree_on_key(self) -> RunKey:
        """A key that only the workers of this run have."""

    def exchange_addresses(self, address: str) -> dict[int, str]:
        """Leave this worker's address and return everybody's, by rank."""


def meet(setting: Setting) -> Meeting:
    """Where this worker meets the others."""
    return SupervisedMeeting(setting) if setting.world.is_spread else SegmentMeeting(setting)


def listening_address(setting: Setting) -> str:
    """Where this worker listens: at a Unix socket, or over tcp where a port was fixed, or others are elsewhere."""
    world = setting.world
    if world.is_spread:
        return world.any_port
    return world.any_socket if setting.port is None else f"tcp://{LOOPBACK}:{setting.port + world.global_rank}"


class SegmentMeeting:
    """In the shared segment of one host."""

    def __init__(self, setting: Setting) -> None:
        self._rank, self._size = setting.world.global_rank, setting.world.world_size
        segment = Segment(setting.world.arena_fd)
        segment.reserve("counters", counter_bytes(self._size))
        segment.reserve("key", _ROW_BYTES)
        segment.reserve("addresses", _ROW_BYTES * self._size)
        segment.map()
        self._counters = segment.counters("counters", setting.company.on_idle)
        self._key = segment.tensor("key", torch.uint8)
        self._addresses = segment.tensor("addresses", torch.uint8).view(self._size, _ROW_BYTES)
        segment.close()

    def agree_on_key(self) -> RunKey:
        """The key that the first worker made for all."""
        from shoal.comm.security import RunKey

        if self._rank == 0:
            _write(self._key, RunKey.create().text)
            self._counters.publish(0, _KEY_IS_THERE)
        self._counters.wait(0, _KEY_IS_THERE)
        return RunKey.from_text(_read(self._key))

    def exchange_addresses(self, address: str) -> dict[int, str]:
        _write(self._addresses[self._rank], address)
        self._counters.publish(self._rank, _ADDRESS_IS_THERE)
        self._counters.wait_all(range(self._size), _ADDRESS_IS_THERE)
        return {rank: _read(row) for rank, row in enumerate(self._addresses)}


class SupervisedMeeting:
    """At the supervisor, to which every worker of every host has a channel."""

    def __init__(self, setting: Setting) -> None:
        assert setting.company.meet is not None, "somebody supervises workers on several hosts"
        self._meet = setting.company.meet
        self._secret = setting.world.secret
        self._generation = setting.world.generation

    def agree_on_key(self) -> RunKey:
        """The key of the run, which whoever starts a process gives to it."""
        from shoal.comm.security import RunKey

        return RunKey.from_text(self._secret)

    def exchange_addresses(self, address: str) -> dict[int, str]:
        return self._meet(f"addresses@{self._generation}", address)


def _write(row: torch.Tensor, text: str) -> None:
    row.copy_(torch.frombuffer(bytearray(text.encode().ljust(len(row), b"\0")), dtype=torch.uint8))


def _read(row: torch.Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode()
