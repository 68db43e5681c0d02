"""When a worker of a served run heeds the wish that it end."""

from __future__ import annotations

import time
from collections.abc import Callable

_OTHERS_PATIENCE_S = 0.5
_FIRST_PATIENCE_S = 5.0


class Departure:
    """In lockstep the first worker decides after which step the run ends, so that what is saved is of one step.

    It finishes the step that it is in, to which the others have a part: they leave when no next one comes.
    Elsewhere everybody leaves at once.
    """

    def __init__(
        self,
        *,
        in_lockstep: bool,
        is_first: bool,
        wants_stop: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._in_lockstep = in_lockstep
        self._is_first = is_first
        self._wants_stop = wants_stop
        self._clock = clock
        self._asked_at: float | None = None
        self.is_in_step = False
        """Whether this worker may have given something to a step that is not done."""
        self.is_over = False
        """Whether nothing is trained any more: what is left to wait for is the model as it is."""

    def is_due_at_border(self) -> bool:
        """After a step: whether to begin no other."""
        return (self._is_first or not self._in_lockstep) and self._wants_stop()

    def is_due_while_waiting(self) -> bool:
        """While others are waited for: whether to wait no longer."""
        if not self._wants_stop():
            return False
        if not self._in_lockstep or (self._is_first and not self.is_in_step):
            return True
        now = self._clock()
        if self._asked_at is None:
            self._asked_at = now
        return now - self._asked_at > (_FIRST_PATIENCE_S if self._is_first else _OTHERS_PATIENCE_S)
