"""When a worker of a served run heeds the wish that it end."""

from __future__ import annotations

import time
from collections.abc import Callable

_OTHERS_PATIENCE_S = 0.5
_FIRST_PATIENCE_S = 5.0
MEETING_PATIENCE_S = 60.0
"""How long the workers may take to come to one border: each is in a step, and one may have to be replaced."""


class Departure:
    """In lockstep the first worker decides after which step the run ends, so that what is saved is of one step.

    It finishes the step that it is in, to which the others have a part: they leave when no next one comes.
    Elsewhere everybody leaves at once; but where the run is saved, all come to one border first (`meets`), from
    which the first worker leaves when it has saved, and the others when they have nothing left to do.
    """

    def __init__(
        self,
        *,
        in_lockstep: bool,
        is_first: bool,
        wants_stop: Callable[[], bool],
        saves: bool = False,
        is_at_rest: Callable[[], bool] = lambda: False,
        is_used_up: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.meets = saves and not in_lockstep
        """Whether all are to come to one border before they leave."""
        self._in_lockstep = in_lockstep
        self._is_first = is_first
        self._wants_stop = wants_stop
        self._is_at_rest = is_at_rest
        self._is_used_up = is_used_up
        """Whether this worker has nothing left to train on: the run comes to its end by itself."""
        self._clock = clock
        self._asked_at: float | None = None
        self.enough = ""
        """Why the first worker has found that training may end."""
        self.is_in_step = False
        """Whether this worker may have given something to a step that is not done."""
        self.is_over = False
        """Whether nothing is trained any more: what is left to wait for is the model as it is."""

    def calls_all(self) -> bool:
        """Whether this worker is to bring all to one border, save there, and leave."""
        is_able = self.meets and self._is_first and not self._is_used_up()
        return is_able and (bool(self.enough) or self._wants_stop())

    def is_due_at_border(self) -> bool:
        """After a step: whether to begin no other."""
        return not self.meets and (self._is_first or not self._in_lockstep) and self._wants_stop()

    def is_due_while_waiting(self) -> bool:
        """While others are waited for: whether to wait no longer."""
        if not self._wants_stop():
            return False
        if self.meets:
            return (self._is_at_rest() and not self._is_first) or self._has_waited(MEETING_PATIENCE_S)
        if not self._in_lockstep or (self._is_first and not self.is_in_step):
            return True
        return self._has_waited(_FIRST_PATIENCE_S if self._is_first else _OTHERS_PATIENCE_S)

    def _has_waited(self, seconds: float) -> bool:
        now = self._clock()
        if self._asked_at is None:
            self._asked_at = now
        return now - self._asked_at > seconds
