"""Which cells a worker of a served job trains on, clock by clock."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.ps.consistency import Mode
from shoal.roles.borders import Borders
from shoal.spec import ParameterServer, World
from shoal.strategies.ps.client import PsClient


class Turns:
    """A worker's way through the run: its own slots of `steps` steps, or whatever it is leased."""

    def __init__(
        self,
        client: PsClient,
        spec: ParameterServer,
        world: World,
        borders: Borders,
        *,
        slots: int,
        own: range,
        steps: int,
    ) -> None:
        self._client = client
        self._spec = spec
        self._rank = world.global_rank
        self._borders = borders
        self._slots = slots
        self._own = own
        self._steps = steps

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """Join, and then clocks with the cells of each."""
        clock = self._client.join()
        self._borders.clear()
        return self._leased(clock) if self._spec.is_leased else self._ranked(clock)

    @property
    def leaves_out_the_late(self) -> bool:
        """Whether rounds may be closed without this worker."""
        return self._client.served.consistency.mode is Mode.QUORUM

    def after(self, cells: list[int]) -> Iterator[int]:
        """These cells, and those that are likely to follow."""
        if (leases := self._client.machine.leases) is not None:
            yield from (*cells, *leases.at_hand)
            return
        for step in range(min(cells) // self._slots, self._steps):
            yield from (step * self._slots + slot for slot in self._own)

    def _ranked(self, clock: int) -> Iterator[tuple[int, list[int]]]:
        """Every rank has its own slots of every step."""
        every = self._spec.every
        while clock <= -(-self._steps // every):
            self._borders.heed(clock)
            steps = range((clock - 1) * every, min(clock * every, self._steps))
            yield clock, [step * self._slots + slot for slot in self._own for step in steps]
            # A quorum may have closed several rounds meanwhile: what is over is left out.
            clock = max(clock + 1, self._client.next_open_round if self.leaves_out_the_late else 0)

    def _leased(self, clock: int) -> Iterator[tuple[int, list[int]]]:
        """Whoever is free takes the next cells: as many as its share asks for."""
        total = self._steps * self._slots
        while (cells := self._borders.take_cells(max(self._spec.every, self._share), total)) is not None:
            if cells:
                yield clock, cells
            else:
                self._client.tick(clock)
            clock += 1

    @property
    def _share(self) -> int:
        """Cells of each of this worker's steps, by its share of the data."""
        shares = self._client.settings.get("shares", {})
        return max(1, round(self._spec.cells_per_worker * shares.get(self._rank, 1.0)))
