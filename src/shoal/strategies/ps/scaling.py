"""A worker's loss scale in a served job: one with all others where they go in lockstep, else its own.

In lockstep every push says what its gradient looks like and what its worker knew of the scale; a closed round
tells both to all, so all come to the same, and so does whoever takes over from a dead worker. Elsewhere a worker
draws its own conclusions, and servers only learn that a gradient is no number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shoal.model.half_range import HalfState, Seen, is_measured
from shoal.ps.worker import WorkerMachine
from shoal.strategies.ps.contribution import Contribution
from shoal.strategies.ps.served import Served

_EXACT = ("none", "zstd")
"""Compression that brings any number as it is; others want gradients as large as they are."""


class WorkerScale:
    """What a worker does about half precision besides computing in it; `views_of` gives a buffer's gradients."""

    def __init__(
        self, served: Served, machine: WorkerMachine, views_of: Callable[[int], Sequence[torch.Tensor]]
    ) -> None:
        self._served = served
        self._machine = machine
        self._views_of = views_of
        self._precision = served.replica.precision
        # Whoever pushes parameters takes steps on its own, and has divided by the scale before.
        self.matters = self._precision.scales and served.spec.push == "gradients"
        """Whether gradients come multiplied, so that there is something to look at and to divide by."""

    @property
    def is_common(self) -> bool:
        """Whether all workers have the same; else each has its own."""
        return self._served.consistency.is_lockstep and self._served.spec.push == "gradients"

    def bind(self, report: Callable[[str], None], *, is_first: bool) -> None:
        """Know the model's layers, and tell of those that leave half precision; once, where all agree."""
        speaks = is_first or not self.is_common
        self._precision.bind(self._served.replica.module, report=report if speaks else None)

    def facts(self) -> dict[str, Any]:
        """What results have to say so that those of several workers can be put together."""
        return {"scales_apart": True} if self._precision.scales and not self.is_common else {}

    def measure(self, buffer: int, cells: Sequence[int]) -> Seen | None:
        """What the gradients of these cells look like that a buffer holds; None where nobody wants to know."""
        if not self.matters:
            return None
        touched = self._served.memory.touched(buffer).tolist()
        named = zip(self._served.replica.trained, self._views_of(buffer), touched, strict=True)
        # Cells of several steps are compared with half precision's range where all of them are to be.
        step = min(map(self._step_of, cells), key=is_measured)
        return self._precision.measure(step, ((name, view) for name, view, is_touched in named if is_touched))

    def judge(self, made: Contribution) -> Contribution:
        """Where the scale matters: say what a complete gradient looks like, and let it be divided by the scale.

        Where this worker's scale is its own, it is adjusted now; `Diverged` where that cannot help any more.
        """
        seen = made.seen or self.measure(made.buffer, made.cells)
        assert seen is not None
        half = self._precision.state.values if self.is_common else ()
        made = replace(made, seen=seen, half=half)
        if made.is_inherited:
            return made
        scale, gathers = self._precision.scale, self._served.consistency.gathers(made.clock)
        if not (gathers and self._served.consistency.needs_all):
            self._precision.conclude(self._step_of(max(made.cells)), seen)
        if self._served.spec.compress in _EXACT and (self.is_common or not gathers):
            return replace(made, scale=1.0 / scale)
        if not made.is_spoilt:  # others may have other scales, or what is sent would not fit
            torch._foreach_mul_(list(self._views_of(made.buffer)), 1.0 / scale)
        return made

    def catch_up(self) -> None:
        """This worker joins: where others are ahead and all have one scale, it is known by the last round."""
        if self.matters and self.is_common:
            self.follow_round(self._served.replica.start.step + self._machine.slowest.rounds)

    def follow_round(self, step: int) -> None:
        """Where the scale matters, and a round that all had a part in is closed: come to what all come to."""
        told = self._machine.slowest
        if not told.found or not self._served.consistency.needs_all:
            return
        if self.is_common:
            self._precision.adopt(HalfState.of(told.half))
        self._precision.conclude(step, Seen.of(told.found))

    def _step_of(self, cell: int) -> int:
        return self._served.replica.start.step + cell // self._served.rules.slots + 1
