"""A worker's part in an elastic run: it waits for a world that it is in, and notices when that is over."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from shoal.arena import Segment
from shoal.comm.group import Group, LoneGroup, MemoryGroup
from shoal.horovod.common.exceptions import HorovodInternalError
from shoal.horovod.elastic.board import Board
from shoal.roles.process.joining import orphan_watch
from shoal.roles.process.station import Station, current_station
from shoal.spec import World

OPTION = "elastic"
"""Of a job whose scripts live in worlds that change."""


class ElasticPlace:
    """Of this process, as long as it lives."""

    def __init__(self, station: Station) -> None:
        assert station.world.arena_fd is not None
        self._node, self._given = station.world.node, station.world
        self._watch = orphan_watch()
        self._board = Board(station.world.arena_fd, self._watch)
        self._generation = 0
        self._seen_wishes = 0

    @property
    def wishes(self) -> int:
        """How often workers have been waiting to be taken in."""
        return self._board.wishes

    @property
    def has_news(self) -> bool:
        """Whether some have come since this world was named."""
        return self._board.wishes > self._seen_wishes

    def look(self) -> None:
        """Raise where this process waits in a world that has lost somebody."""
        self._watch()
        if self._board.doomed >= self._generation > 0:
            raise HorovodInternalError("A process of this world has died, and its part will not come.")

    def enter(self, on_idle: Callable[[], None]) -> tuple[World, Group]:
        """Ask for a world, and wait until there is one."""
        self._board.ask(self._node)
        named = self._board.wait_for(self._generation + 1)
        while self._node not in named.nodes:  # it was named before this process had asked
            named = self._board.wait_for(named.generation + 1)
        self._generation, self._seen_wishes = named.generation, self._board.wishes
        rank, size = named.nodes.index(self._node), len(named.nodes)
        os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)})
        world = replace(
            self._given,
            global_rank=rank,
            world_size=size,
            local_rank=rank,
            local_size=size,
            generation=named.generation,
            places=(),
        )
        if size == 1:
            return world, LoneGroup(rank)
        return world, MemoryGroup.of_all(Segment.of(named.memory), rank, size, on_idle)

    def leave(self) -> None:
        """Nothing has to be said: the next `enter` is."""


_places: list[ElasticPlace] = []
"""That of this process, once it has one: `init` is handed nothing."""


def elastic_world() -> ElasticPlace | None:
    """This process's place in an elastic run; None where its world stays as it is."""
    station = current_station()
    if station is None or not station.job.options.get(OPTION):
        return None
    if not _places:
        _places.append(ElasticPlace(station))
    return _places[-1]
