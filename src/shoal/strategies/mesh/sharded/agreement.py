"""Workers agree on what they gather or reduce next, in the middle of forward and backward passes.

A worker that needs a unit says so in one small message to all in its row. Mostly all need the same at a time.
Where they do not (a branch that only some samples take, a lane without samples, a loss that is skipped) they take
turns: all join in what is asked for, whether they need it themselves or not. So nobody waits for a call that never
comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.comm.group import Group
from shoal.strategies.mesh.sharded.unit import ShardedUnit

_NOTHING = -1


class UseAgreement:
    """What is asked for is a number: 2u to gather unit u, 2u + 1 to reduce it; the largest comes first."""

    def __init__(self, units: Sequence[ShardedUnit], axis: Group) -> None:
        self._units = units
        self._axis = axis
        self._asked = torch.zeros(1, dtype=torch.int64)

    def gather(self, number: int) -> None:
        """Have the parameters of a unit here."""
        self._ask_until_done(2 * number)

    def reduce(self, number: int) -> None:
        """Bring the gradients of a unit to their owners."""
        self._ask_until_done(2 * number + 1)

    def help_others(self) -> None:
        """Join in what others ask for, until nobody asks for anything."""
        self._ask_until_done(_NOTHING)

    def _ask_until_done(self, wanted: int) -> None:
        done = None
        while done != wanted:
            self._axis.max_(self._asked.fill_(wanted))
            done = int(self._asked)
            if done != _NOTHING:
                self._join_in(done, keeps=done == wanted)

    def _join_in(self, asked: int, *, keeps: bool) -> None:
        unit = self._units[asked // 2]
        if asked % 2:
            unit.reduce()
            return
        keeps = keeps or unit.is_gathered
        unit.gather()
        if not keeps:
            unit.let_go()
