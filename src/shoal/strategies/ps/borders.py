"""Where a served run is saved: at a border between steps, to which all workers come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from shoal.spec import ParameterServer, World
from shoal.strategies.ps.client import PsClient
from shoal.strategies.ps.holding import Hold

_LISTEN_S = 0.05


class Border(NamedTuple):
    """All stand still, and the servers have what was pushed up to here, and nothing more."""

    steps: int
    """That this run has taken."""
    waited_s: float
    """How long the others had to be waited for."""


class Borders:
    """One worker's way to a border; the first worker asks for it, saves what is there, and lets all go on.

    Whatever may meet a border on its way yields it, to the first worker alone; when it is asked to go on, what is
    there has been saved. While nobody is held there is nothing to ask here.
    """

    def __init__(
        self,
        client: PsClient,
        spec: ParameterServer,
        world: World,
        *,
        slots: int,
    ) -> None:
        self._client = client
        self._spec = spec
        self._is_first = world.is_first
        self._slots = slots
        self._hold = Hold(client.machine, client.wait, world.generation)
        self._next_clock: int | None = None
        """The clock that this worker does not begin because of a hold."""

    def bring_about(self) -> None:
        """The first worker wants to save."""
        if self._hold.current is None:
            self._hold.ask()

    def call_all(self) -> None:
        """The first worker wants to save and leave: all are to come to the next border there can be."""
        if not self._hold.is_asked_for:
            self._hold.ask()

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is left to do before the border of the hold under way."""
        hold, leases = self._hold.current, self._client.machine.leases
        if hold is None or hold[1] is None:
            return False
        if leases is None:
            return self._next_clock is not None and self._next_clock > hold[1]
        return leases.committed >= hold[1] and not leases.held

    def clear(self) -> None:
        """A first worker that died may have left the others waiting; its successor lets them go.

        Where cells are leased it saves at the border in the other's place.
        """
        if self._is_first and not self._spec.is_leased:
            self._hold.release()

    # Where every rank has cells of its own.

    def begin_again(self, clock: int) -> Iterator[Border]:
        """All were held while this worker waited for its turn: where this step is past the border, go there first,
        and wait once more."""
        while not self._spec.is_leased and not self._hold.may_begin(clock) and not self._client.is_redealt:
            yield from self.heed(clock)
            self._client.begin(clock)

    def heed(self, clock: int) -> Iterator[Border]:
        """Where all are to come to one border, go no further; but who has got another slot may have to, for it."""
        while (hold := self._hold.current) is not None and not self._hold.may_begin(clock):
            self._next_clock = clock
            if self._client.is_redealt:
                break
            if self._is_first and hold[1] is not None:
                came = time.monotonic()
                if not self._client.await_all(clock - 1):
                    continue
                steps = (clock - 1) * self._spec.every
                if self._hold.is_exact(steps * self._slots):
                    yield Border(steps, time.monotonic() - came)
                self._hold.release()
            else:
                self._client.hear(_LISTEN_S)
        self._next_clock = None

    def speak(self) -> None:
        """Called while this worker waits: say where it is, if all are to come to one border."""
        if self._client.beginning is not None and not self._spec.is_leased:
            self._hold.may_begin(self._client.beginning)

    # Where cells are leased.

    def is_there(self) -> bool:
        """Whether nothing is left for the first worker but to save, while all are held."""
        leases = self._client.machine.leases
        assert leases is not None
        return self._is_first and self._hold.current is not None and not leases.held

    def wait_there(self, total: int) -> Iterator[Border]:
        """Wait until the servers have all cells up to the border that was reached; of `total` in this run."""
        leases, hold = self._client.machine.leases, self._hold.current
        assert leases is not None and hold is not None and hold[1] is not None
        came, border = time.monotonic(), hold[1]
        if self._hold.await_seen(border, is_needed=lambda: bool(leases.held)):
            if border < total and self._hold.is_exact(border):
                yield Border(border // self._slots, time.monotonic() - came)
            self._hold.release()
