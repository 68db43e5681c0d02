"""Data parallel over several hosts: on each an arena with the whole state, between them a chain.

Inside a host everything is as with one: its workers fill their slots, own chunks, update them. What a host must
know of the others' slots besides their gradients (losses, weights, who touched what, moving buffers) its first
worker, the *speaker*, exchanges with theirs, and leaves in the segment where those slots' own workers would have
left it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from shoal.comm.group import Group, SocketGroup
from shoal.errors import SpecError
from shoal.model.replica import Replica
from shoal.spec import Data
from shoal.strategies.base import Fill, Setting
from shoal.strategies.data.arena import ArenaData
from shoal.strategies.data.chain import HostChain
from shoal.strategies.data.decision import StepDecision
from shoal.strategies.data.update import SlicedUpdate
from shoal.strategies.groups.over_hosts import open_transport, ranks_by_host


class SpreadData(ArenaData):
    """An arena that knows of others. Nobody can take over a worker's part of a step that other hosts wait for: a
    death is followed by another attempt."""

    def __init__(self, spec: Data) -> None:
        super().__init__(replace(spec, journal=False))
        del self.handover

    def open(self, replica: Replica, setting: Setting) -> None:
        world = setting.world
        self._rank, self._hosts = world.global_rank, ranks_by_host(world.hosts)
        self._own_host = next(host for host, ranks in enumerate(self._hosts) if self._rank in ranks)
        self._links = SocketGroup(
            open_transport(setting), range(world.world_size), on_idle=setting.company.on_idle
        )
        self._speakers = _speakers(self._links, self._hosts)
        self._slots = [_slots_of(setting, ranks) for ranks in self._hosts]
        if self._speaks:
            # Hosts may build a model with other bits from the same seed; the first one's counts.
            for tensor in (*replica.trained.values(), *replica.untrained.values()):
                values = tensor.data.contiguous().view(-1)
                self._speakers.broadcast_(values)
                tensor.data.copy_(values.view(tensor.shape))
        company = replace(setting.company, on_idle=self._look_up(setting.company.on_idle))
        super().open(replica, replace(_inside(setting, self._hosts[self._own_host]), company=company))
        if not self._sliced:
            raise SpecError(
                f"data: {type(replica.optimizer).__name__} does not work element by element, as via=chain wants "
                "it on several hosts; use via=ring, or one host."
            )
        cast = torch.bfloat16 if self._spec.between == "bf16" else None
        self._chain = HostChain(
            self._links,
            self._hosts,
            self._own_host,
            self._shared.grid,
            cast,
            goes_straight=all(len(slots) == 1 for slots in self._slots),
        )

    def _look_up(self, on_idle: Callable[[], None] | None) -> Callable[[], None]:
        """While a worker waits inside its host, those of others may wait for it to take what they sent."""

        def look_up() -> None:
            self._links.pump()
            if on_idle is not None:
                on_idle()

        return look_up

    @property
    def _speaks(self) -> bool:
        return self._rank == self._hosts[self._own_host][0]

    def _await_gradients(self, step: int) -> None:
        if self._speaks:
            self._exchange_rows(step)
        super()._await_gradients(step)

    def _exchange_rows(self, step: int) -> None:
        """Tell the other hosts what this one's slots have left beside their gradients, and leave theirs here."""
        marks, counters = self._shared.marks, self._shared.counters
        for slot in self._slots[self._own_host]:
            counters.wait(marks.gradients[slot], step)
        asked = [counters[mark] for mark in marks.stop_at if 0 < counters[mark] <= step]
        told = [torch.zeros(8 + self._row_bytes * len(slots), dtype=torch.uint8) for slots in self._slots]
        told[self._own_host][:8].view(torch.int64)[0] = min(asked, default=0)
        for row, slot in zip(self._rows(told, self._own_host), self._slots[self._own_host], strict=True):
            torch.cat(self._left_by(slot), out=row)
        self._speakers.all_gather_(told)
        for host, slots in enumerate(self._slots):
            if host == self._own_host:
                continue
            stop = int(told[host][:8].view(torch.int64)[0])
            if stop and not counters[marks.stop_at[0]]:
                counters[marks.stop_at[0]] = stop
            for row, slot in zip(self._rows(told, host), slots, strict=True):
                left = self._left_by(slot)
                for room, content in zip(left, row.split([part.numel() for part in left]), strict=True):
                    room.copy_(content)
                counters.publish(marks.gradients[slot], step)

    def _left_by(self, slot: int) -> list[torch.Tensor]:
        """The bytes in the segment that a slot's worker fills, besides its gradients."""
        shared = self._shared
        tables = [shared.results[slot], shared.touched[slot]]
        if self._precision is not None:
            tables.append(self._precision.seen[slot])
        return [*(torch.from_numpy(table).view(torch.uint8) for table in tables), self._buffers.left_by(slot)]

    @property
    def _row_bytes(self) -> int:
        return sum(part.numel() for part in self._left_by(0))

    def _rows(self, told: Sequence[torch.Tensor], host: int) -> tuple[torch.Tensor, ...]:
        return told[host][8:].split(self._row_bytes) if self._slots[host] else ()

    def _begin_sums(self, decision: StepDecision) -> None:
        (update,) = self._updates.values()
        assert isinstance(update, SlicedUpdate)
        update.totals = self._chain.total
        self._chain.send_up(update.owned(), decision.touched)

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        self.settle()
        table = torch.zeros(shape, dtype=torch.float64)
        fill(table, self._rank)
        self._links.all_reduce_(table)
        return table

    def close(self) -> None:
        super().close()
        self._links.close()


def _speakers(links: Group, hosts: Sequence[range]) -> Group:
    """The first workers of all hosts, among themselves."""
    first = [ranks[0] for ranks in hosts]
    return links.split([first, *([rank] for ranks in hosts for rank in ranks[1:])])


def _slots_of(setting: Setting, ranks: range) -> list[int]:
    return [slot for rank in ranks for slot in setting.slots_of(rank)]


def _inside(setting: Setting, ranks: range) -> Setting:
    """The setting as it would be if this host were the only one, and others filled the slots of nobody here."""
    world = setting.world
    local = replace(
        world,
        global_rank=world.local_rank,
        world_size=len(ranks),
        places=(world.local_rank,),
        hosts=(),
        host_number=0,
    )
    fills = (*(setting.slots_of(rank) for rank in ranks), range(setting.slots))
    return replace(setting, world=local, conduct=replace(setting.conduct, fills=fills))
