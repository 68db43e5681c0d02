"""The simulated network: every message takes its time, and some fare worse, by seed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass

from shoal.comm.codec import decode, encode
from shoal.errors import ProtocolError
from shoal.ps.messages import PsMessage
from shoal.ps.packing import pack, unpack

FASTEST_S, SLOWEST_S = 0.0005, 0.002


@dataclass(frozen=True, kw_only=True)
class NetFaults:
    """How often each fault strikes a message: probabilities."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    corrupt: float = 0.0
    max_delay_s: float = 0.15

    @property
    def any(self) -> bool:
        return bool(self.drop or self.duplicate or self.delay or self.corrupt)


class Network:
    """Messages on their way, soonest first."""

    TRACED = 80

    def __init__(self, faults: NetFaults, dice: random.Random, *, through_codec: bool = False) -> None:
        self.sent = 0
        self.injected: Counter[str] = Counter()
        self.trace: deque[tuple[float, int, int, PsMessage, str]] = deque(maxlen=self.TRACED)
        self._faults = faults
        self._dice = dice
        self._through_codec = through_codec
        self._order = itertools.count()
        self._on_their_way: list[tuple[float, int, int, int, PsMessage]] = []

    @property
    def next_at(self) -> float:
        return self._on_their_way[0][0] if self._on_their_way else float("inf")

    def send(self, sender: int, receiver: int, message: PsMessage, now: float) -> None:
        """Put a message on its way, or not, as the faults will."""
        self.sent += 1
        fate = self._fate() if self._faults.any else ""
        self.trace.append((now, sender, receiver, message, fate))
        if fate == "corrupt":
            self._assert_refused(message)
        if fate in ("drop", "corrupt"):
            return
        if self._through_codec:
            message = unpack(decode([bytes(buffer) for buffer in encode(pack(message))]))
        for _ in range(2 if fate == "duplicate" else 1):
            takes = self._dice.uniform(FASTEST_S, SLOWEST_S)
            if fate == "delay":
                takes += self._dice.uniform(0, self._faults.max_delay_s)
            heapq.heappush(self._on_their_way, (now + takes, next(self._order), sender, receiver, message))

    def take(self) -> tuple[int, int, PsMessage]:
        """The message that arrives next: sender, receiver and itself."""
        return heapq.heappop(self._on_their_way)[2:]

    def _fate(self) -> str:
        dart = self._dice.random()
        for name in ("drop", "duplicate", "delay", "corrupt"):
            dart -= getattr(self._faults, name)
            if dart < 0:
                self.injected[name] += 1
                return name
        return ""

    def _assert_refused(self, message: PsMessage) -> None:
        """A message with one bit flipped is as good as lost: whoever receives it can tell."""
        buffers = [bytearray(buffer) for buffer in encode(pack(message))]
        victim = self._dice.choice([buffer for buffer in buffers if buffer])
        victim[self._dice.randrange(len(victim))] ^= 1 << self._dice.randrange(8)
        try:
            decode(buffers)
        except ProtocolError:
            return
        raise AssertionError(f"A damaged {message.kind} was taken for a good one.")
