"""Processes that are asked to end before the others, and killed where they do not."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from shoal.comm.words import Stop
from shoal.launch.crew import Hand
from shoal.launch.succession import Bridge
from shoal.observe.happenings import Warned

_PATIENCE_S = 30.0
"""How long a process may take to end that was asked to."""


class Dismissals:
    """A part of the supervisor's machine."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    def dismiss(self, hand: Hand) -> None:
        """Ask a process to end, unless that was done before."""
        if hand.dismissed_at is None:
            hand.dismissed_at = self._bridge.now
            self._bridge.say(hand, Stop())

    def act(self) -> None:
        """End those whose time is over."""
        for ends_at, hand in list(self._waited_for()):
            if self._bridge.now >= ends_at:
                hand.is_overdue = True
                text = f"{hand.name} did not end within {_PATIENCE_S:.0f} s of being asked and was killed."
                self._bridge.emit(Warned(text=text))
                self._bridge.signal(hand, signal.SIGKILL)

    def next_deadline(self) -> float | None:
        """When `act` must be called at the latest."""
        return min((ends_at for ends_at, _ in self._waited_for()), default=None)

    def _waited_for(self) -> Iterator[tuple[float, Hand]]:
        for hand in self._bridge.crew.living():
            if hand.dismissed_at is not None and not hand.is_overdue:
                yield hand.dismissed_at + _PATIENCE_S, hand
