"""Gradients of a group of workers as one push."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shoal.model.buffers import BufferMean
from shoal.model.half_range import Seen
from shoal.step.compute import Sums, backward_part
from shoal.strategies.ps.client import PsClient
from shoal.strategies.ps.contributions import Computed, MakeWork, computed, contribution_of
from shoal.strategies.ps.group import PushGroup
from shoal.strategies.ps.memory import ServedMemory
from shoal.strategies.ps.served import Served


@dataclass(frozen=True, kw_only=True)
class _Own:
    """What this worker brings to its group."""

    sums: Sums
    scaled: bool
    seen: Seen | None
    moved: BufferMean


class GroupMaker:
    """Backward passes over this worker's cells; then the sum over its group, which the leader pushes."""

    def __init__(self, served: Served, client: PsClient, make_work: MakeWork, group: PushGroup) -> None:
        self._served = served
        self._client = client
        self._make_work = make_work
        self._group = group
        self._flats: dict[int, list[torch.Tensor]] = {}

    def __call__(self, clock: int, cells: Sequence[int], slot: int) -> Computed:
        buffer = self._client.aim(slot, clock)
        own = self._differentiate(cells, buffer)
        sums, seen = self._agree(own, buffer)
        if buffer not in self._flats:
            self._flats[buffer] = flat_gradients(self._served.memory, buffer)
        for flat in self._flats[buffer]:
            self._group.bring_together(flat, clock)
        if self._group.leads(clock):
            of_group = self._cells_of_group(cells[0] // self._served.rules.slots)
            made = contribution_of(sums, clock=clock, cells=of_group, buffer=buffer, scaled=own.scaled)
            self._client.push(replace(made, seen=seen))
        return computed(own.sums, cells)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()

    def _differentiate(self, cells: Sequence[int], buffer: int) -> _Own:
        """The sum of this worker's gradients, in the buffer; zeros where it has none and others may."""
        moved, total, scaled = self._served.moving.begin_mean(), Sums(), False
        for cell in cells:
            step, slot = divmod(cell, self._served.rules.slots)
            work = self._make_work(step + 1, range(slot, slot + 1), apart=False)
            moved.start()
            sums = backward_part(self._served.replica, work, work.parts[0], self._client.tap.backward)
            moved.add(sums.weight)
            total += sums
            scaled = work.parts[0].total_weight is not None
        seen = self._client.scale.measure(buffer, cells)
        touched = self._served.memory.touched(buffer).tolist()
        for view, has_gradient in zip(self._client.views(buffer), touched, strict=True):
            if not has_gradient:
                view.zero_()
        return _Own(sums=total, scaled=scaled, seen=seen, moved=moved)

    def _agree(self, own: _Own, buffer: int) -> tuple[Sums, Seen | None]:
        """Everything but the gradients, summed over the group; what it came to, and what it has seen.

        It is small, and goes first: when it is through, everybody is there.
        """
        ranks, rank, touched = self._group.ranks, self._client.machine.rank, self._served.memory.touched(buffer)
        weights = torch.zeros(len(ranks), dtype=torch.float64)
        weights[rank - ranks.start] = own.sums.weight
        head = torch.tensor([own.sums.loss, float(own.moved.counted), *own.sums.all_parts], dtype=torch.float64)
        seen = torch.tensor(() if own.seen is None else own.seen.values, dtype=torch.float64)
        table = torch.cat([head, weights, touched.double(), seen])
        self._group.add_up(table)
        head, weights, touching, seen = table.split([len(head), len(ranks), len(touched), len(seen)])
        loss, counted, *parts = head.tolist()
        touched.copy_(touching > 0)
        if weight := float(weights.sum()):
            speaker = ranks.start + int(weights.nonzero()[0])
            own.moved.finish(self._group.add_up, weight, counted=bool(counted), speaks=speaker == rank)
        told = tuple(parts[: len(self._served.replica.loss_parts.names)])
        return Sums(loss, weight, parts=told), None if own.seen is None else Seen.of(seen.tolist())

    def _cells_of_group(self, step: int) -> list[int]:
        slots, workers, ranks = self._served.rules.slots, self._served.rules.workers, self._group.ranks
        return [step * slots + s for s in range(slots * ranks.start // workers, slots * ranks.stop // workers)]


def flat_gradients(memory: ServedMemory, buffer: int) -> list[torch.Tensor]:
    """A buffer of gradients as one flat tensor per dtype."""
    region = memory.tensor(f"gradients/{buffer}", torch.uint8)
    flats = []
    for dtype in dict.fromkeys(p.dtype for p in memory.params):
        own = [
            (offset, p) for offset, p in zip(memory.grid.offsets, memory.params, strict=True) if p.dtype == dtype
        ]
        end = own[-1][0] + own[-1][1].numel() * dtype.itemsize
        flats.append(region[own[0][0] : end].view(dtype))
    return flats
