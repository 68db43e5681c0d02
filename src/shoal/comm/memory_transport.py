"""A transport inside one process, for tests: it can drop, delay, duplicate and damage packets, by seed."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, fields

from shoal.comm.codec import Buffer
from shoal.comm.linked import LinkedTransport
from shoal.comm.reliable import Packet, Reliability
from shoal.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How often each fault strikes a packet: probabilities from 0 to 1."""

    drop: float = 0.0
    delay: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    """One bit flips."""
    max_delay_s: float = 0.005
    seed: int = 0
    """The same seed strikes the same packets of each direction of each link."""

    def __post_init__(self) -> None:
        for name in ("drop", "delay", "duplicate", "corrupt"):
            if not 0 <= getattr(self, name) <= 1:
                raise SpecError(
                    f"Faults: {name} must be a probability from 0 to 1, found {getattr(self, name)!r}."
                )

    @property
    def any(self) -> bool:
        """Whether anything can strike at all."""
        return any(getattr(self, f.name) for f in fields(self) if f.name not in ("max_delay_s", "seed"))


class MemoryTransport(LinkedTransport):
    """One process's end of a `MemoryNetwork`."""

    def __init__(self, rank: int, network: MemoryNetwork, reliability: Reliability) -> None:
        super().__init__(rank, _MemoryWire(rank, network), generation=0, reliability=reliability)
        self._link_to(peer for peer in range(network.size) if peer != rank)


class MemoryNetwork:
    """Connects `size` transports, one for each thread: `network.transport(rank)`."""

    def __init__(self, size: int, *, faults: Faults | None = None, reliability: Reliability | None = None) -> None:
        self.size = size
        self.injected: Counter[str] = Counter()
        """How often each fault struck so far, by its name in `Faults`."""
        self._faults = faults or Faults()
        self._reliability = reliability or Reliability(
            resend_after_s=0.02, acknowledge_after_s=0.005, linger_s=5.0, await_goodbyes=self._faults.any
        )
        self._changed = threading.Condition()
        self._order = itertools.count()
        self._arriving: list[list[tuple[float, int, Packet]]] = [[] for _ in range(size)]
        self._dice: dict[tuple[int, int], random.Random] = {}
        self._closed: set[int] = set()

    def transport(self, rank: int) -> MemoryTransport:
        """The transport of this rank; make one for each."""
        return MemoryTransport(rank, self, self._reliability)

    def carry(self, sender: int, peer: int, packet: Packet) -> None:
        """Bring a packet to a peer, or not, as the faults will."""
        with self._changed:
            if peer in self._closed:
                return
            dice = self._dice.setdefault((sender, peer), random.Random(f"{self._faults.seed} {sender} {peer}"))
            if self._strikes("drop", dice):
                return
            for _ in range(2 if self._strikes("duplicate", dice) else 1):
                # A copy, as any real wire makes: the sender may reuse its memory once this has arrived.
                copied = [bytearray(buffer) for buffer in packet]
                if self._strikes("corrupt", dice):
                    _flip_one_bit(copied, dice)
                wait_s = dice.uniform(0, self._faults.max_delay_s) if self._strikes("delay", dice) else 0.0
                arrival = (time.monotonic() + wait_s, next(self._order), list[Buffer](copied))
                heapq.heappush(self._arriving[peer], arrival)
            self._changed.notify_all()

    def next_for(self, rank: int, timeout_s: float) -> Packet | None:
        """The next packet that has arrived at this rank."""
        deadline = time.monotonic() + timeout_s
        arriving = self._arriving[rank]
        with self._changed:
            while True:
                now = time.monotonic()
                if arriving and arriving[0][0] <= now:
                    return heapq.heappop(arriving)[2]
                if now >= deadline:
                    return None
                due = min(deadline, arriving[0][0]) if arriving else deadline
                self._changed.wait(due - now)

    def gone_for(self, rank: int) -> Collection[int]:
        """Ranks that closed, once this rank has everything they sent."""
        with self._changed:
            return () if self._arriving[rank] else self._closed - {rank}

    def close(self, rank: int) -> None:
        """This rank is there no more."""
        with self._changed:
            self._closed.add(rank)
            self._changed.notify_all()

    def _strikes(self, fault: str, dice: random.Random) -> bool:
        struck = dice.random() < getattr(self._faults, fault)
        self.injected[fault] += struck
        return struck


class _MemoryWire:
    strangers = 0
    """Nobody reaches this wire from outside."""

    def __init__(self, rank: int, network: MemoryNetwork) -> None:
        self._rank = rank
        self._network = network

    def transmit(self, peer: int, packet: Packet) -> None:
        self._network.carry(self._rank, peer, packet)

    def poll(self, timeout_s: float) -> Packet | None:
        return self._network.next_for(self._rank, timeout_s)

    def gone(self) -> Collection[int]:
        return self._network.gone_for(self._rank)

    def close(self) -> None:
        self._network.close(self._rank)


def _flip_one_bit(buffers: list[bytearray], dice: random.Random) -> None:
    victim = dice.choice([buffer for buffer in buffers if buffer])
    victim[dice.randrange(len(victim))] ^= 1 << dice.randrange(8)
