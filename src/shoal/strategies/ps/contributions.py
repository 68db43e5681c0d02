"""What a worker makes of its cells and pushes: a gradient, or parameters that it trained on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from shoal.ps.consistency import Mode
from shoal.step.compute import Sums, backward_part, check_weight
from shoal.step.update import Update
from shoal.step.work import Work
from shoal.strategies.ps.client import PsClient
from shoal.strategies.ps.contribution import Contribution
from shoal.strategies.ps.served import Served


class MakeWork(Protocol):
    """The work of a step for a process that fills these slots; `apart`: each is a batch of its own."""

    def __call__(self, step: int, slots: range, *, apart: bool) -> Work: ...


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What a worker did in one call."""

    cells: Sequence[int]
    """Those that it was given, and more where it took more."""
    loss: float
    """Weighted."""
    weight: float
    loss_parts: tuple[float, ...] = ()
    """Of each number that the loss is told with; none where that is not known."""


def computed(sums: Sums, cells: Sequence[int]) -> Computed:
    """What the passes over these cells came to."""
    return Computed(cells=cells, loss=sums.loss, weight=sums.weight, loss_parts=sums.parts)


def contribution_of(sums: Sums, *, clock: int, cells: Sequence[int], buffer: int, scaled: bool) -> Contribution:
    """The same, to be pushed."""
    return Contribution(
        clock=clock,
        cells=cells,
        buffer=buffer,
        weight=sums.weight,
        loss=sums.loss,
        scaled=scaled,
        loss_parts=sums.parts,
    )


class Contribute(Protocol):
    """Computes on cells and pushes."""

    def __call__(self, clock: int, cells: Sequence[int], slot: int) -> Computed:
        """Do it for this clock; `slot` says whose buffers to use."""

    def close(self) -> None:
        """There is nothing more to do."""


class GradientMaker:
    """One backward pass per cell; those of several cells add up to one gradient."""

    def __init__(self, served: Served, client: PsClient, make_work: MakeWork) -> None:
        self._served = served
        self._client = client
        self._make_work = make_work

    def __call__(self, clock: int, cells: Sequence[int], slot: int) -> Computed:
        if (left := self._client.inherited(clock, cells[0], slot)) is not None:
            self._client.push(left)
            return Computed(cells=cells, loss=left.loss, weight=left.weight)
        buffer = self._client.aim(slot, clock)
        if self._pushes_by_parts and len(cells) == 1:
            return self._push_by_parts(clock, cells, buffer)
        sums, scaled = Sums(), False
        for cell in cells:
            own, scaled = self._differentiate(cell, clock, alone=len(cells) == 1)
            sums += own
        self._client.push(contribution_of(sums, clock=clock, cells=cells, buffer=buffer, scaled=scaled))
        return computed(sums, cells)

    def close(self) -> None:
        """It keeps nothing."""

    @property
    def _pushes_by_parts(self) -> bool:
        """Not in lockstep: the gradient of a worker that dies in between would be torn, and the result another.

        Nor where all of a gradient must be known before any of it may be applied.
        """
        spec, replica = self._served.spec, self._served.replica
        wanted = spec.overlap == "on" or (spec.overlap == "auto" and not self._served.shares_memory)
        gathers = self._served.consistency.mode in (Mode.BSP, Mode.QUORUM)
        knows_all_first = replica.task.clip_norm is not None or replica.precision.scales
        return wanted and not gathers and replica.task.accumulate == 1 and not knows_all_first

    def _push_by_parts(self, clock: int, cells: Sequence[int], buffer: int) -> Computed:
        """Each shard's gradient goes out while the backward pass goes on to the layers before."""
        step, slot = divmod(cells[0], self._served.rules.slots)
        apart = not self._served.consistency.gathers(clock)
        work = self._make_work(step + 1, range(slot, slot + 1), apart=apart)
        part, tap = work.parts[0], self._client.tap

        def backward(loss: torch.Tensor, share: torch.Tensor | None) -> None:
            factor = 1.0 if share is None else float(share)
            weight = factor if part.total_weight is None else factor * part.total_weight
            self._client.open_push(
                Contribution(
                    clock=clock,
                    cells=cells,
                    buffer=buffer,
                    weight=weight,
                    loss=loss.item() * weight,
                    scaled=part.total_weight is not None,
                )
            )
            tap.on_taken = self._client.on_gradient
            try:
                tap.backward(loss, share)
            finally:
                tap.on_taken = None
            self._client.complete_push()

        sums = backward_part(self._served.replica, work, part, backward)
        if not sums.weight:  # padding alone: there was no pass
            self._client.push(
                Contribution(clock=clock, cells=cells, buffer=buffer, weight=0.0, loss=0.0, scaled=True)
            )
        return computed(sums, cells)

    def _differentiate(self, cell: int, clock: int, *, alone: bool) -> tuple[Sums, bool]:
        """Add a cell's gradient to the buffer; what it came to, and whether it is a mean already."""
        step, slot = divmod(cell, self._served.rules.slots)
        apart = not self._served.consistency.gathers(clock)
        work = self._make_work(step + 1, range(slot, slot + 1), apart=apart)
        # A quorum's mean is over those that came, and who they are is known only then.
        is_mean = alone and self._served.consistency.needs_all
        part = work.parts[0] if is_mean else replace(work.parts[0], total_weight=None)
        sums = backward_part(self._served.replica, work, part, self._client.tap.backward)
        return sums, part.total_weight is not None


class ParameterMaker:
    """Steps of the task's own optimizer, on this worker alone; then its parameters are pushed."""

    def __init__(self, served: Served, client: PsClient, make_work: MakeWork) -> None:
        self._served = served
        self._client = client
        self._make_work = make_work
        client.tap.close()
        self._params = list(served.replica.trained.values())
        self._update = Update(served.replica, served.replica.task.clip_norm)

    def __call__(self, clock: int, cells: Sequence[int], slot: int) -> Computed:
        sums = sum((self._train_on(cell) for cell in cells), start=Sums())
        buffer = self._client.offer_parameters(slot, clock)
        self._client.push(contribution_of(sums, clock=clock, cells=cells, buffer=buffer, scaled=True))
        return computed(sums, cells)

    def close(self) -> None:
        """It keeps nothing."""

    def _train_on(self, cell: int) -> Sums:
        replica = self._served.replica
        step, slot = divmod(cell, self._served.rules.slots)
        work = self._make_work(step + 1, range(slot, slot + 1), apart=True)
        for param in self._params:
            param.grad = None
        sums = backward_part(replica, work, work.parts[0])
        check_weight(work, sums)
        gradients = [param.grad for param in self._params if param.grad is not None]
        named = ((name, param.grad) for name, param in replica.trained.items())
        if self._update.scale_and_check(work, sums.weight, gradients, named):
            self._update.clip(self._params)
            replica.optimizer.step()
        replica.advance(sums.loss / sums.weight)
        for param in self._params:
            param.grad = None
        return sums
