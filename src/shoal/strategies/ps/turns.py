"""Which cells a worker of a served job trains on, clock by clock, and where it stands still in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.ps.consistency import Mode
from shoal.spec import ParameterServer, World
from shoal.step.work import Turn
from shoal.strategies.ps.borders import Border, Borders
from shoal.strategies.ps.client import PsClient


@dataclass(frozen=True, kw_only=True)
class ServedTurn(Turn):
    """A clock's cells. Without any: a border, a round, or the end of what this worker has to do."""

    clock: int = 0
    cells: tuple[int, ...] = ()
    is_round: bool = False
    """All that this worker has to give to a clock is pushed: what is left is that others do their part."""
    waited_s: float = 0.0
    """At a border: how long the others had to be waited for."""


class Turns:
    """A worker's way through the run: the slots of `steps` steps that it is dealt, or whatever it is leased.

    Servers and coordinator count steps from where this run began, the loop from where training did: `begun_at`.
    """

    def __init__(
        self,
        client: PsClient,
        spec: ParameterServer,
        world: World,
        borders: Borders,
        *,
        slots: int,
        steps: int,
        begun_at: int,
    ) -> None:
        self._client = client
        self._spec = spec
        self._rank = world.global_rank
        self._borders = borders
        self._slots = slots
        self._steps = steps
        self._begun_at = begun_at
        self.is_void = False
        """Set where the turn came to nothing: it is to be taken again."""
        self.open_clock = 0
        """The clock that this worker has pushed its part of, where it left without waiting for the others."""
        self.is_used_up = False
        """Whether nothing is left for this worker to train on, as far as it knows."""

    def __iter__(self) -> Iterator[ServedTurn]:
        """Join, and then turn by turn; each begins when consistency lets it, with the newest parameters."""
        clock = self._client.join()
        self._borders.clear()
        if not self._spec.is_leased:
            yield from self._dealt()
        else:
            for found in self._leased(clock):
                yield from self._begun(found) if isinstance(found, ServedTurn) else (self._border(found),)
        self.is_used_up = True
        self._client.beginning = self.num_clocks + 1  # none is left: a hold finds it past its last one

    @property
    def num_clocks(self) -> int:
        """Pushes for a slot."""
        return -(-self._steps // self._spec.every)

    @property
    def leaves_out_the_late(self) -> bool:
        """Whether rounds may be closed without this worker."""
        return self._client.served.consistency.mode is Mode.QUORUM

    def step_of(self, cell: int) -> int:
        """The step that a cell belongs to."""
        return self._begun_at + cell // self._slots + 1

    def _begun(self, turn: ServedTurn) -> Iterator[ServedTurn]:
        """The turn, once it may begin, and again where it came to nothing; not where other slots go first."""
        while True:
            self._client.begin(turn.clock)
            if self._client.is_held:
                yield from map(self._border, self._borders.begin_again(turn.clock))
            if self._client.is_redealt:
                return
            yield turn
            if not self.is_void:
                return
            self.is_void = False

    def _border(self, border: Border) -> ServedTurn:
        return ServedTurn(step=self._begun_at + border.steps, is_border=True, waited_s=border.waited_s)

    def _turn(self, clock: int, cells: list[int]) -> ServedTurn:
        coming = ((self.step_of(cell), cell % self._slots) for cell in self._after(cells))
        first, last = self.step_of(min(cells)), self.step_of(max(cells))
        return ServedTurn(step=last, first=first, clock=clock, cells=tuple(cells), coming=coming)

    def _after(self, cells: list[int]) -> Iterator[int]:
        """These cells, and those that are likely to follow."""
        if (leases := self._client.machine.leases) is not None:
            yield from (*cells, *leases.at_hand)
            return
        held = self._client.machine.slots.held if self._client.machine.slots is not None else ()
        for step in range(min(cells) // self._slots, self._steps):
            yield from (step * self._slots + slot for slot in held)

    def _dealt(self) -> Iterator[ServedTurn]:
        """Every worker has slots of its own, of every step; those go first that are furthest behind."""
        machine, slots = self._client.machine, self._client.machine.slots
        assert slots is not None
        while not machine.is_out:
            self._client.follow_deal()
            coming = slots.coming(machine.completed, at_least=self._first_open)
            clock = self.num_clocks + 1 if coming is None else coming.clock
            if 0 < self.open_clock < clock:
                yield ServedTurn(step=self._step_after(self.open_clock), clock=self.open_clock, is_round=True)
                continue
            if coming is None or clock > self.num_clocks:
                # Whoever has no slots has no say where all are to meet.
                self.is_used_up, self._client.beginning = True, None if coming is None else clock
                if self._client.await_all(self.num_clocks):
                    return
                self.is_used_up, self._client.beginning = False, None
                continue
            if self._client.is_held:
                yield from map(self._border, self._borders.heed(clock))
            if not self._client.is_redealt:
                for turn in self._begun(self._turn(clock, self._cells_of(clock, coming.slots))):
                    yield turn
                    if not turn.is_border and not self.is_void:
                        slots.begin(coming)

    def _cells_of(self, clock: int, slots: Sequence[int]) -> list[int]:
        every = self._spec.every
        steps = range((clock - 1) * every, min(clock * every, self._steps))
        return [step * self._slots + slot for slot in slots for step in steps]

    def _step_after(self, clock: int) -> int:
        return self._begun_at + min(clock * self._spec.every, self._steps)

    @property
    def _first_open(self) -> int:
        """Where every clock is a round of all: the first that is not over. A quorum may have closed several."""
        return self._client.next_open_round if self._client.served.consistency.gathers(1) else 0

    def _leased(self, clock: int) -> Iterator[ServedTurn | Border]:
        """Whoever is free takes the next cells: as many as its share asks for."""
        total = self._steps * self._slots
        while True:
            count = max(self._spec.every, self._share)
            cells = self._client.take_cells(count, unless=self._borders.is_there)
            if cells is None:
                return
            if not cells and self._borders.is_there():
                yield from self._borders.wait_there(total)
                continue
            if cells:
                yield self._turn(clock, cells)
            else:
                self._client.tick(clock)
            clock += 1

    @property
    def _share(self) -> int:
        """Cells of each of this worker's steps, by its share of the data."""
        shares = self._client.settings.get("shares", {})
        return max(1, round(self._spec.cells_per_worker * shares.get(self._rank, 1.0)))
