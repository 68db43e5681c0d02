"""Data parallel over several hosts: on each an arena with the whole state, between them a chain.

Inside a host everything is as with one: its workers fill their slots, own chunks, update them. What a host must
know of the others' slots besides their gradients (losses, weights, who touched what, moving buffers) its first
worker, the *speaker*, exchanges with theirs, and leaves in the segment where those slots' own workers would have
left it.

When hosts are lost, those that are left meet again, do what the lost ones did, and go on in the step that they are
in: `reform`, by what `accord.py` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from shoal.comm.group import Group, SocketGroup
from shoal.comm.transport import Transport
from shoal.errors import SpecError
from shoal.feed.parts import Part
from shoal.model.replica import Replica
from shoal.spec import Data, World
from shoal.spec.vocabulary import Role
from shoal.step.compute import SAMPLES, Sums
from shoal.step.work import Work
from shoal.strategies.base import Fill, Setting, StepResult
from shoal.strategies.data.accord import Accord, Standing, agree
from shoal.strategies.data.arena import ArenaData
from shoal.strategies.data.chain import HostChain
from shoal.strategies.data.decision import StepDecision
from shoal.strategies.data.early import EarlyChunks
from shoal.strategies.data.update import SlicedUpdate
from shoal.strategies.groups.orders import awaiting_orders
from shoal.strategies.groups.over_hosts import open_transport, ranks_by_host

_TABLE, _STATE = -2, -3
"""The tags of what is passed on to those who lack it; those of chunks are not negative."""


class SpreadData(ArenaData):
    """An arena that knows of others. Hosts may be lost and others go on; who follows a worker that died alone has
    its place in the host's memory, which is filled anew from another host."""

    def __init__(self, spec: Data) -> None:
        super().__init__(replace(spec, journal=False))
        self._chain: HostChain | None = None
        self._decided = 0
        """The last step that was whole somewhere when all met: who still has to take it exchanges nothing."""
        self._own_slots: list[int] = []
        """Those whose gradients this host computed when all had last met."""
        self._num_early = self._num_sent = 0
        """Chunks of all hosts and steps: those that left before all gradients were there, and all."""
        self._guests: tuple[int, ...] = ()
        """Hosts that wait for the state after the step that was decided, and get it from this worker."""
        self._transport: Transport | None = None

    def open(self, replica: Replica, setting: Setting) -> None:
        self._among_all = setting
        page = setting.company.page
        self._page = (
            torch.empty(0, dtype=torch.uint8) if page is None else torch.frombuffer(page, dtype=torch.uint8)
        )
        is_there = setting.world.role == Role.WORKER
        if is_there:
            self._come_together(setting.world)
        if is_there and self._speaks:
            # Hosts may build a model with other bits from the same seed; the first one's counts.
            for tensor in (*replica.trained.values(), *replica.untrained.values()):
                values = tensor.data.contiguous().view(-1)
                self._speakers.broadcast_(values)
                tensor.data.copy_(values.view(tensor.shape))
        company = replace(setting.company, on_idle=self._look_up(setting.company.on_idle))
        slots = self._slots[self._own_host] if is_there else ()
        super().open(replica, replace(_inside(setting, slots), company=company))
        if not self._sliced:
            raise SpecError(
                f"data: {type(replica.optimizer).__name__} does not work element by element, as via=chain wants "
                "it on several hosts; use via=ring, or one host."
            )
        if is_there:
            self._begin_chain()

    def _come_together(self, world: World) -> None:
        """Have links to all workers of this generation."""
        setting = self._among_all = replace(self._among_all, world=world)
        if self._transport is not None:
            self._transport.abort()
        self._transport = open_transport(setting)
        self._links = SocketGroup(self._transport, range(len(world.dealt)), on_idle=setting.company.on_idle)
        self._hosts = ranks_by_host(world.hosts)
        self._own_host = next(host for host, ranks in enumerate(self._hosts) if self._links.index in ranks)
        self._speakers = _speakers(self._links, self._hosts)
        self._slots = [_slots_of(setting, ranks) for ranks in self._hosts]

    def _begin_chain(self) -> None:
        cast = torch.bfloat16 if self._spec.between == "bf16" else None
        self._chain = HostChain(
            self._links,
            self._hosts,
            self._own_host,
            self._shared.grid,
            cast,
            self._chain,
            goes_straight=len(self._hosts) > 1 and all(len(slots) == 1 for slots in self._slots),
        )
        self._own_slots = self._slots[self._own_host]
        (update,) = self._updates.values()
        assert isinstance(update, SlicedUpdate)
        table = self._shared.segment.tensor("early", torch.int32).numpy()
        self._early = EarlyChunks(
            self._shared.grid,
            table.reshape(-1, len(self._shared.grid.chunks)),
            self._own_slots,
            dict(update.owned()),
            self._chain.leave_early,
            self._links.pump,
        )

    @property
    def _sends_early(self) -> bool:
        """Whether gradients that a pass has made are those of the step, whatever comes after it."""
        task, extent = self._replica.task, self._setting.extent
        is_final = extent.accumulate == 1 and task.skip_loss_below is None and not self._replica.is_by_sample
        return is_final and len(self._hosts) > 1 and self._precision is None

    def _compute(self, work: Work, part: Part) -> Sums:
        if self._sends_early:
            self._early.begin(work.step, part.slot, may_leave=self._passes.never_meet)
            self._tap.on_taken = self._early.on_taken
        try:
            return super()._compute(work, part)
        finally:
            self._tap.on_taken = None

    def _look_up(self, on_idle: Callable[[], None] | None) -> Callable[[], None]:
        """While a worker waits inside its host, those of others may wait for it to take what they sent."""

        def look_up() -> None:
            if self._transport is not None:
                self._links.pump()
            if on_idle is not None:
                on_idle()

        return look_up

    @property
    def _speaks(self) -> bool:
        return self._links.index == self._hosts[self._own_host][0]

    @property
    def _place(self) -> int:
        """Whose chunks this worker owns on its host."""
        return self._setting.world.global_rank

    # A step.

    def take(self, work: Work) -> StepResult:
        with awaiting_orders(self._among_all.company):
            result = super().take(work)
            self._welcome_guests()
        return result

    def _await_gradients(self, step: int) -> None:
        if self._speaks and step > self._decided:
            self._exchange_rows(step)
        super()._await_gradients(step)

    def _exchange_rows(self, step: int) -> None:
        """Tell the other hosts what this one's slots have left beside their gradients, and leave theirs here."""
        marks, counters = self._shared.marks, self._shared.counters
        for slot in self._slots[self._own_host]:
            counters.wait(marks.gradients[slot], step)
        asked = [counters[mark] for mark in marks.stop_at if 0 < counters[mark] <= step]
        early = torch.from_numpy(self._early.left(step)).view(torch.uint8)
        page_end = 8 + len(self._page)
        head_bytes = page_end + len(early)
        told = [torch.zeros(head_bytes + self._row_bytes * len(slots), dtype=torch.uint8) for slots in self._slots]
        told[self._own_host][:8].view(torch.int64)[0] = min(asked, default=0)
        told[self._own_host][8:page_end] = self._page
        told[self._own_host][page_end:head_bytes] = early
        for row, slot in zip(self._rows(told, self._own_host), self._slots[self._own_host], strict=True):
            torch.cat(self._left_by(slot), out=row)
        self._speakers.all_gather_(told)
        if self._own_host:  # the first worker is on the first of them
            self._page.copy_(told[0][8:page_end])
        self._num_sent += len(self._hosts) * len(early)
        for host, slots in enumerate(self._slots):
            left = told[host][page_end:head_bytes].numpy()
            self._num_early += int(left.sum())
            if host == self._own_host:
                continue
            if slots:
                self._early.note(step, slots, left)
            stop = int(told[host][:8].view(torch.int64)[0])
            if stop and not counters[marks.stop_at[0]]:
                counters[marks.stop_at[0]] = stop
            for row, slot in zip(self._rows(told, host), slots, strict=True):
                rooms = self._left_by(slot)
                for room, content in zip(rooms, row.split([part.numel() for part in rooms]), strict=True):
                    room.copy_(content)
                if step < len(self._shared.counts):
                    self._shared.counts[step, slot] = int(self._shared.results[slot, SAMPLES])
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
        rows = told[host][len(told[host]) - self._row_bytes * len(self._slots[host]) :]
        return rows.split(self._row_bytes) if self._slots[host] else ()

    def _begin_sums(self, decision: StepDecision) -> None:
        """Have all sums here, in every worker of this host, before the first chunk is updated: whoever has begun
        to take a step can then give all of it to those who have not."""
        marks, counters, step, chain = self._shared.marks, self._shared.counters, decision.step, self._chain
        (update,) = self._updates.values()
        assert isinstance(update, SlicedUpdate) and chain is not None
        if counters[marks.totals[self._place]] < step:
            if decision.sums.weight and decision.is_taken:
                came_early = [self._early.noted(step, slots) for slots in self._slots]
                chain.send_up(update.owned(), decision.touched, came_early)
                chain.await_totals()
            elif self._speaks:
                self._speakers.barrier()  # all know that there is nothing to sum
            counters.publish(marks.totals[self._place], step)
        counters.wait_all(marks.totals, step)
        if counters[marks.updated[self._place]] < step:
            update.begin_step()
        update.totals = chain.total

    def _result(self, step: int, decision: StepDecision) -> StepResult:
        share = self._num_early / self._num_sent if self._num_sent else 0.0
        return replace(super()._result(step, decision), facts={"early": round(share, 3)})

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        self.settle()
        marks, counters = self._shared.marks, self._shared.counters
        room = self._shared.table_of(serial, shape)
        if counters[marks.shared_rows[self._place]] < serial:
            table = torch.zeros(shape, dtype=torch.float64)
            for place in self._among_all.world.places:
                fill(table, place)
            with awaiting_orders(self._among_all.company):
                self._links.all_reduce_(table)
            room.copy_(table)  # all of this host write the same
            counters.publish(marks.shared_rows[self._place], serial)
        return room.clone()

    # Hosts that are lost.

    def reform(self, world: World) -> int:
        with awaiting_orders(self._among_all.company):
            self._guests = ()
            self._come_together(world)
            accord = agree(self._standings(), self._hosts)
            self._decided = accord.step
            if self._own_host not in accord.guests:
                self._go_on_with(accord)
            self._pass_on_table(accord)
            self._links.barrier()  # nobody computes before all know what is to be computed again
            if self._own_host in accord.guests:
                self._be_welcomed(accord)
            elif self._speaks and self._own_host == accord.giver:
                self._guests = accord.guests
                self._welcome_guests()
        return accord.step

    def _standings(self) -> list[Standing]:
        """How far all workers are, by number."""
        marks, counters = self._shared.marks, self._shared.counters
        world = self._among_all.world
        named = (marks.totals, marks.updated, marks.shared_rows)
        own = [
            *(counters[mark[self._place]] for mark in named),
            counters[marks.opened],
            world.host_number in world.torn,
        ]
        return [
            Standing(totals=totals, taken=taken, tables=tables, is_guest=not opened, is_torn=bool(torn))
            for totals, taken, tables, opened, torn in (
                one.tolist() for one in self._links.all_gather(torch.tensor([int(number) for number in own]))
            )
        ]

    def _go_on_with(self, accord: Accord) -> None:
        """Have what others have, and let nothing count that was begun after it with those who are lost."""
        marks, counters = self._shared.marks, self._shared.counters
        if self._speaks:
            for slot in set(self._slots[self._own_host]) - set(self._own_slots):  # their gradients are not here
                counters[marks.gradients[slot]] = min(counters[marks.gradients[slot]], accord.step)
        if not self._updates:  # its host has just been given everything, when this worker had to leave off
            self._join(replace(self._setting.world, role=Role.WORKER))
        self._host_anew()
        (update,) = self._updates.values()
        assert isinstance(update, SlicedUpdate) and self._chain is not None
        self._chain.pass_on(update.owned(), accord.giver, accord.lacking)
        counters[marks.totals[self._place]] = accord.step

    def _host_anew(self) -> None:
        """Sum the slots that are this host's from now on."""
        self._shared.summed_slots = self._slots[self._own_host]
        self._updates.clear()
        self._host(self._setting.world)
        self._begin_chain()
        self._early.forget()  # before all come together: nobody computes until then

    def _pass_on_table(self, accord: Accord) -> None:
        room, own = self._shared.table_of(accord.table), self._links.index
        if own == accord.table_giver:
            for other in accord.without_table:
                self._links.send(room, other, _TABLE)
        elif own in accord.without_table:
            self._links.receive(room, accord.table_giver, _TABLE).wait()
            self._shared.counters.publish(self._shared.marks.shared_rows[self._place], accord.table)

    # Hosts that come.

    def _welcome_guests(self) -> None:
        """Give all of the state to hosts that have come, once this one has taken the step that they go on after.
        It stands still meanwhile: they have a part in the next one."""
        if not self._guests or self.committed() < self._decided:
            return
        guests, self._guests = self._guests, ()
        for name in self._shared.lasting:
            content = self._shared.segment.tensor(name, torch.uint8)
            if name == "counts":  # where others of this host note what they compute for the next step
                content = content.clone()
            for host in guests:
                self._links.send(content, self._hosts[host][0], _STATE)

    def _be_welcomed(self, accord: Accord) -> None:
        """Have the state of others, as if this host had taken all steps with them."""
        shared, marks, counters = self._shared, self._shared.marks, self._shared.counters
        times_opened = self._among_all.world.generation + 1
        if self._speaks:
            for name in shared.lasting:
                room = shared.segment.tensor(name, torch.uint8)
                self._links.receive(room, self._hosts[accord.giver][0], _STATE).wait()
            for mark in (*marks.gradients, *marks.norms, *marks.updated, *marks.totals):
                counters[mark] = accord.step
            for mark in marks.shared_rows:
                counters[mark] = accord.table
            counters.publish(marks.opened, times_opened)
        counters.wait(marks.opened, times_opened)
        if not self._updates:
            self._join(replace(self._setting.world, role=Role.WORKER))
        self._host_anew()

    def close(self) -> None:
        super().close()
        if self._transport is not None:
            self._links.close()


def _speakers(links: Group, hosts: Sequence[range]) -> Group:
    """The first workers of all hosts, among themselves."""
    first = [ranks[0] for ranks in hosts]
    return links.split([first, *([rank] for ranks in hosts for rank in ranks[1:])])


def _slots_of(setting: Setting, ranks: range) -> list[int]:
    """The slots that these workers fill."""
    return [slot for rank in ranks for place in setting.world.dealt[rank] for slot in setting.slots_of(place)]


def _inside(setting: Setting, slots: Sequence[int]) -> Setting:
    """The setting as it would be if this host were the only one; its workers fill these slots, and nobody here the
    others."""
    world = setting.world
    local = replace(
        world,
        global_rank=world.local_rank,
        world_size=world.local_size,
        places=(world.local_rank,),
        hosts=(),
        deal=(),
        host_number=0,
    )
    own = range(slots[0], slots[-1] + 1) if slots else range(0)
    fills = (*[own] * world.local_size, range(setting.slots))
    return replace(setting, world=local, conduct=replace(setting.conduct, fills=fills))
