"""Consistency: who may begin a step, and which gradients make one update. Pure functions over clocks.

A rank's clock counts its steps, from 1. `floor` is the smallest clock that all ranks have completed, `rounds` the
last clock whose gradients were gathered into one update.

    bsp           every clock is gathered; the next begins when it is closed
    quorum:k/n    the same, closed by the first k of n slots; what comes later is dropped
    ssp:N         every gradient is an update of its own; nobody is more than N steps ahead of the slowest
    asp           the same, and nobody waits
    alternate:K   K clocks as in asp, then one as in bsp
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from shoal.errors import SpecError


class Mode(StrEnum):
    """The families of consistency."""

    BSP = "bsp"
    QUORUM = "quorum"
    SSP = "ssp"
    ASP = "asp"
    ALTERNATE = "alternate"


@dataclass(frozen=True, kw_only=True)
class Consistency:
    """One rule for a whole job; `parse_sync` makes it."""

    mode: Mode
    bound: int = 0
    """ssp: how many steps ahead of the slowest; alternate: how many asynchronous steps between two synchronous."""
    quorum: tuple[int, int] = (0, 0)
    """quorum: how many slots close a round, and of how many."""

    def __str__(self) -> str:
        if self.mode in (Mode.SSP, Mode.ALTERNATE):
            return f"{self.mode}:{self.bound}"
        return f"quorum:{self.quorum[0]}/{self.quorum[1]}" if self.mode is Mode.QUORUM else str(self.mode)

    @property
    def waits(self) -> bool:
        """Whether a worker ever has to wait for others, so that it wants to be told how far they are."""
        return self.mode is not Mode.ASP

    @property
    def needs_all(self) -> bool:
        """Whether a gathered round is closed by all slots, and is nothing without one of them."""
        return self.mode is not Mode.QUORUM or self.quorum[0] == self.quorum[1]

    @property
    def is_lockstep(self) -> bool:
        """Whether every step is a round of all slots, so that all workers come to know the same after each."""
        return self.mode in (Mode.BSP, Mode.QUORUM) and self.needs_all

    def gathers(self, clock: int) -> bool:
        """Whether the gradients of this clock are gathered into one update."""
        if self.mode is Mode.ALTERNATE:
            return clock % (self.bound + 1) == 0
        return self.mode in (Mode.BSP, Mode.QUORUM)

    def next_gathered(self, rounds: int) -> int | None:
        """The clock that is gathered next after round `rounds`, where any is; nobody may be further."""
        if self.mode in (Mode.SSP, Mode.ASP):
            return None
        period = self.bound + 1
        return (rounds // period + 1) * period

    def needed(self, slots: int) -> int:
        """How many of the slots complete a gathered round."""
        if self.mode is not Mode.QUORUM:
            return slots
        k, n = self.quorum
        if n != slots:
            raise SpecError(f"sync={self} speaks of {n} slots, but the job has {slots}; write quorum:k/{slots}.")
        return k

    def may_start(self, clock: int, *, floor: int, rounds: int) -> bool:
        """Whether a worker may begin its step `clock`."""
        match self.mode:
            case Mode.ASP:
                return True
            case Mode.SSP:
                return clock - 1 - floor <= self.bound
            case Mode.ALTERNATE:
                period = self.bound + 1
                last_gathered = (clock - 1) // period * period
                return rounds >= last_gathered and (not self.gathers(clock) or floor >= clock - 1)
            case _:
                return rounds >= clock - 1

    def with_bound(self, bound: int) -> Consistency:
        """The same rule with another bound, where it has one: what the coordinator may adjust in a run."""
        return replace(self, bound=bound) if self.mode is Mode.SSP else self


def parse_sync(text: str) -> Consistency:
    """The rule that `bsp`, `asp`, `ssp:N`, `alternate:K` or `quorum:k/n` names."""
    if text in (Mode.BSP, Mode.ASP):
        return Consistency(mode=Mode(text))
    if found := re.fullmatch(r"(ssp|alternate):(\d+)", text):
        mode, bound = Mode(found[1]), int(found[2])
        # With no step between them, all steps are synchronous; and nobody ahead of anybody is synchronous too.
        return Consistency(mode=mode, bound=bound) if bound else Consistency(mode=Mode.BSP)
    if found := re.fullmatch(r"quorum:(\d+)/(\d+)", text):
        k, n = int(found[1]), int(found[2])
        if 1 <= k <= n:
            return Consistency(mode=Mode.QUORUM, quorum=(k, n))
        raise SpecError(f"sync=quorum:k/n needs 1 <= k <= n, found {text!r}.")
    raise SpecError(
        f"sync must be bsp, asp, ssp:N, alternate:K or quorum:k/n in whole numbers (as in ssp:3), found {text!r}."
    )
