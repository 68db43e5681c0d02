"""A worker's part in a hold: all come to one border between steps, where the first saves what the servers have."""

from __future__ import annotations

import time
from collections.abc import Callable

from shoal.ps.worker import WorkerMachine

_ASK_EVERY_S = 0.02
_HOLDS_PER_LIFE = 1 << 32
"""A first worker asks for fewer, so that its successor's have numbers of their own."""
Wait = Callable[[Callable[[], bool]], None]
"""Hears the news until something has come true."""


class Hold:
    """What this worker knows of the hold under way, and what it says about it.

    `generation`: how many had this rank before. What was said of a hold of the dead must not count for another.
    """

    def __init__(
        self, machine: WorkerMachine, wait: Wait, generation: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._machine = machine
        self._before = generation * _HOLDS_PER_LIFE
        self._wait = wait
        self._now = clock
        self._asked_at = 0.0

    @property
    def current(self) -> tuple[int, int | None] | None:
        """Its number and border, where there is one."""
        view = self._machine.view
        hold = None if view is None else view.settings.get("hold")
        return None if hold is None else (hold[0], hold[1])

    def ask(self) -> None:
        """The first worker wants all at one border."""
        current, facts = self.current[0] if self.current else 0, self._machine.facts
        number = 1 + max(self._before, facts.get("released", 0), current)
        if facts.get("hold") != number:
            self._say(hold=number)

    @property
    def is_asked_for(self) -> bool:
        """Whether the hold under way is one that this worker has asked for; others are planned, or of the dead."""
        return self.current is not None and self._machine.facts.get("hold", 0) >= self.current[0]

    def release(self) -> None:
        """The first worker is done: all may go on."""
        if self.current is not None:
            number = self.current[0]
            self._say(released=number)
            self._wait(lambda: self.current is None or self.current[0] != number)

    def may_begin(self, clock: int) -> bool:
        """Whether a worker with cells of its own may begin this clock; if not, it says how far it is."""
        if self.current is None:
            return True
        number, border = self.current
        # Where another had a slot before, some shards may have its next push already: the border is past that.
        told = [number, max(clock - 1, self._machine.reached)]
        if border is None and self._machine.facts.get("held") != told and self._machine.outstanding == 0:
            self._say(held=told)
        return border is not None and clock <= border

    def await_seen(self, cells: int, is_needed: Callable[[], bool]) -> bool:
        """Wait until every shard has so many cells; False if this worker `is_needed` for that."""

        def is_decided() -> bool:
            now = self._now()
            if now - self._asked_at >= _ASK_EVERY_S:
                self._asked_at = now
                self._machine.ask_how_far(now)
            return self.have_seen(cells) or is_needed()

        self._wait(is_decided)
        return self.have_seen(cells)

    def have_seen(self, cells: int) -> bool:
        """Whether every shard has so many cells."""
        return all(link.seen >= cells for link in self._machine.links)

    def is_exact(self, cells: int) -> bool:
        """Whether none has more than these: what somebody pushed before it died may come late."""
        return all(link.seen <= cells for link in self._machine.links)

    def _say(self, **facts: object) -> None:
        self._machine.facts.update(facts)
        self._machine.report_now(self._now())
