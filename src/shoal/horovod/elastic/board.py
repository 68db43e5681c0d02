"""What an elastic driver and its workers tell each other, in memory that all of them map.

Every counter has one writer and only rises. A worker asks for a world; once all who live do, the driver names the
next one. Where a process of a world dies, the driver dooms that world, and everybody in it asks for another.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from shoal.arena import Segment, counter_bytes

MOST_NODES = 1024
"""Processes that a driver may ever start."""
_WORLD_BYTES = 64 << 10
_NAMED, _DOOMED, _WISHES, _NUM_OF_DRIVER = 0, 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class NamedWorld:
    """Who computes together from now on."""

    generation: int
    nodes: tuple[int, ...]
    """The workers' own numbers, in the order of their ranks: who has been there longest comes first."""
    memory: str
    """The handle of the segment that they share."""


class Board:
    """One process's view of it."""

    def __init__(self, arena_fd: int, on_idle: Callable[[], None] | None = None) -> None:
        segment = Segment(arena_fd)
        segment.reserve("counters", counter_bytes(_NUM_OF_DRIVER + MOST_NODES))
        segment.reserve("world", _WORLD_BYTES)
        segment.map()
        self._counters = segment.counters("counters", on_idle)
        self._text = segment.bytes_of("world")

    @property
    def doomed(self) -> int:
        """The last generation that has lost a process; earlier ones are over, too."""
        return self._counters[_DOOMED]

    @property
    def wishes(self) -> int:
        """Rises when workers are waiting to be taken in."""
        return self._counters[_WISHES]

    def asked(self, node: int) -> int:
        """How often this worker has asked for a world."""
        return self._counters[_NUM_OF_DRIVER + node]

    def ask(self, node: int) -> None:
        """A worker: have a world."""
        self._counters[_NUM_OF_DRIVER + node] = self.asked(node) + 1

    def name(self, world: NamedWorld) -> None:
        """The driver: this is the world."""
        text = json.dumps([world.nodes, world.memory]).encode()
        assert len(text) <= _WORLD_BYTES
        self._text[: len(text)] = text
        self._text[len(text) :] = bytes(_WORLD_BYTES - len(text))
        self._counters.publish(_NAMED, world.generation)

    def doom(self, generation: int) -> None:
        """The driver: this world has lost a process."""
        self._counters.publish(_DOOMED, generation)

    def wish(self) -> None:
        """The driver: somebody waits to be taken in."""
        self._counters.publish(_WISHES, self.wishes + 1)

    def wait_for(self, generation: int) -> NamedWorld:
        """A worker that has asked: this world or a later one. Nobody names another before all have asked again."""
        self._counters.wait(_NAMED, generation)
        nodes, memory = json.loads(bytes(self._text).rstrip(b"\0"))
        return NamedWorld(generation=self._counters[_NAMED], nodes=tuple(nodes), memory=memory)
