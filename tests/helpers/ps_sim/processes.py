"""Simulated processes: a machine of the protocol, and what its process does besides."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

from helpers.ps_sim.saving import Saved, Saving
from helpers.ps_sim.scenario import Scenario
from helpers.ps_sim.values import ChainValues, Gradients, Home, Memory, gradient
from shoal.ps.buffers import Buffers, Label
from shoal.ps.consistency import Mode, parse_sync
from shoal.ps.dealing import ComingSlots, SlotHolder
from shoal.ps.leasing import LeaseHolder
from shoal.ps.link import Offer
from shoal.ps.messages import Ack, PsMessage, PushOutcome
from shoal.ps.primary import Timing
from shoal.ps.rules import ShardRules, Together
from shoal.ps.server import ServerMachine
from shoal.ps.worker import WorkerMachine

TIMING = Timing(patience_s=0.04, fill_patience_s=0.06, report_every_s=0.1)
MOST_OUTSTANDING = 2
STEP_S = (0.001, 0.006)
PART_S = (0.0005, 0.003)


def rules_of(scenario: Scenario) -> ShardRules:
    return ShardRules(
        consistency=parse_sync(scenario.sync),
        slots=scenario.num_slots,
        workers=scenario.workers,
        leased=scenario.leased,
        together=Together.NORMS if scenario.together else None,
    )


class ServerProcess:
    """A server: its machine, and its copies in the memory that all share.

    It calls `flush` before the work of an update: what it had to say until then is on its way when it dies there.
    In the middle of that work it calls `amid`.
    """

    def __init__(
        self,
        scenario: Scenario,
        node: int,
        number: int,
        now: float,
        memory: Memory,
        gradients: Gradients,
        flush: Callable[[], None],
        amid: Callable[[], None],
        host: int = 0,
    ) -> None:
        self._memory = memory
        self._gradients = gradients if scenario.in_memory else None
        self._amid = amid
        self._shares_memory = scenario.shares_memory
        self._flush = flush
        self.machine = ServerMachine(
            node=node,
            number=number,
            address=f"sim://{node}",
            rules=rules_of(scenario),
            make_values=self._make_values,
            now=now,
            host=host,
            timing=TIMING,
        )

    @property
    def wakeup(self) -> float:
        return self.machine.wakeup

    def on_message(self, sender: int, message: PsMessage, now: float) -> None:
        self.machine.on_message(sender, message, now)

    def on_tick(self, now: float) -> None:
        self.machine.on_tick(now)

    def _make_values(self, shard: int, copy: int) -> ChainValues:
        if not self._shares_memory:
            values = ChainValues(shard, self._flush, gradients=self._gradients)
            self._memory[shard, copy] = values.home
            return values
        homes = [self._memory.setdefault((shard, one), Home(shard)) for one in (copy, 1 - copy)]
        return ChainValues(shard, self._flush, *homes, gradients=self._gradients, amid=self._amid)


class WorkerProcess:
    """A worker: takes cells, reads the copies that count, computes for a while, pushes, and goes on when it may.

    The run's last cells are held back until `may_finish`: so that there is a run left to mend what was broken.
    """

    def __init__(
        self,
        scenario: Scenario,
        node: int,
        rank: int,
        now: float,
        dice: random.Random,
        memory: Memory,
        gradients: Gradients,
        may_finish: Callable[[], bool],
        *,
        generation: int,
        saved: list[Saved],
    ) -> None:
        leases = LeaseHolder(now=now, patience_s=TIMING.patience_s) if scenario.leased else None
        self.machine = WorkerMachine(
            node=node,
            rank=rank,
            num_shards=scenario.shards,
            consistency=parse_sync(scenario.sync),
            now=now,
            leases=leases,
            slots=None if scenario.leased else SlotHolder(node),
            timing=TIMING,
            address=f"sim://{node}",
        )
        self.rank = rank
        self.is_done = False
        self.applied: dict[int, set[int]] = defaultdict(set)
        """By shard: the cells that it was told are applied."""
        self.late: dict[int, set[int]] = defaultdict(set)
        self._scenario = scenario
        self._dice = dice
        self._memory = memory
        self._may_finish = may_finish
        self._clock = 0
        self._slot = rank
        self._cell: int | None = None
        self._based_on: list[int] = []
        self._ready_at = float("inf")
        self._gradients = gradients if scenario.in_memory else None
        slots = self.machine.slots
        self._buffers = Buffers(
            self.machine, gradients, (lambda _: generation) if slots is None else slots.life_of
        )
        self._left: tuple[int, Label] | None = None
        """What another has left, and this one only has to push."""
        self._has_joined = False
        self._parts: list[int] = []
        """Shards whose part of the push under way is still to be computed."""
        saves = scenario.save_every and (rank == 0 or not scenario.leased) and scenario.can_save
        self._saving = Saving(scenario, self.machine, generation, memory, saved) if saves else None

    @property
    def wakeup(self) -> float:
        return min(self.machine.wakeup, self._ready_at, self._saving.wakeup if self._saving else float("inf"))

    def on_message(self, sender: int, message: PsMessage, now: float) -> None:
        if isinstance(message, Ack):
            self._note(message)
        self.machine.on_message(sender, message, now)
        self._go_on(now)

    def on_tick(self, now: float) -> None:
        if now >= self.machine.wakeup:
            self.machine.on_tick(now)
        if now >= self._ready_at and self._gradients is not None:
            self._push_through(self._gradients, now)
        elif now >= self._ready_at:
            self._push(now)
        self._go_on(now)

    def _note(self, ack: Ack) -> None:
        push = self.machine.links[ack.shard].unacked.get(ack.sequence)
        if push is not None and ack.outcome == PushOutcome.APPLIED:
            self.applied[ack.shard].update(push.cells)
        elif push is not None and ack.outcome == PushOutcome.LATE:
            self.late[ack.shard].update(push.cells)

    def _go_on(self, now: float) -> None:
        machine = self.machine
        if self._cell is not None and self._ready_at == float("inf") and self._may_finish():
            self._ready_at = now
        if self._saving is not None:
            self._saving.wakeup = float("inf")
        if self._cell is not None or self.is_done or not machine.is_ready:
            return
        if machine.slots is not None and machine.is_out:
            self.is_done = True  # It was told to leave.
            return
        if machine.slots is not None and not machine.follow_deal(now):
            return
        coming = self._coming()
        if self._saving is not None and not self._may_go_on(self._saving, now):
            return
        if coming is not None and machine.outstanding < MOST_OUTSTANDING and machine.may_start(coming.clock):
            self._slot = coming.slots[0]
            if self._buffers.is_free(self._buffers.buffer_of(self._slot, coming.clock)):
                self._cell = self._next_cell(coming, now)
        if coming is not None and self._cell is not None:
            self._clock = coming.clock
            self._based_on = [self._read(shard) for shard in range(self._scenario.shards)]
            if self._gradients is not None:
                self._begin(self._gradients)
            if not self._is_of_the_last(self._cell) or self._may_finish():
                self._ready_at = now + self._dice.uniform(*STEP_S)
        elif not machine.outstanding and self._nothing_is_left():
            self.is_done = True
            machine.facts["done"] = True

    def _coming(self) -> ComingSlots | None:
        """The next clock, and whose it is."""
        machine = self.machine
        if machine.slots is None:
            return ComingSlots(max(self._clock, machine.completed()) + 1, [self.rank])
        coming = machine.slots.coming(machine.completed)
        return None if coming is None or coming.clock > self._scenario.steps else coming

    def _is_of_the_last(self, cell: int) -> bool:
        return cell >= self._scenario.num_cells - self._scenario.num_slots

    def _may_go_on(self, saving: Saving, now: float) -> bool:
        if self.machine.leases is not None:
            return saving.go_on(now)
        if not self._has_joined:
            self._has_joined = True
            saving.clear(now)
        assert self.machine.slots is not None
        coming = self.machine.slots.coming(self.machine.completed)
        return coming is None or saving.may_begin(coming.clock, now) or self._nothing_is_left()

    def _read(self, shard: int) -> int:
        holders = self.machine.links[shard].holders
        assert holders is not None and (shard, holders.copy) in self._memory, f"Shard {shard} is read too soon."
        return self._memory[shard, holders.copy].updates

    def _next_cell(self, coming: ComingSlots, now: float) -> int | None:
        if self.machine.leases is not None:
            return self.machine.leases.take(now)
        cell = (coming.clock - 1) * self._scenario.num_slots + self._slot
        if self._is_of_the_last(cell) and not self._may_finish():
            return None  # Who has begun a cell does not let go of its slot, and others may wait for that.
        assert self.machine.slots is not None
        self.machine.slots.begin(ComingSlots(coming.clock, [self._slot]))
        return cell

    def _nothing_is_left(self) -> bool:
        """Whether all is trained on; who has slots of its own waits for the others, whose it may have to take."""
        if self.machine.leases is not None:
            return self.machine.leases.is_over
        steps, links = self._scenario.steps, self.machine.links
        if self.machine.consistency.gathers(steps):
            return all(link.rounds >= steps for link in links)
        return all(link.floor >= steps for link in links)

    def _push(self, now: float) -> None:
        assert self._cell is not None
        cells, based_on = [self._cell], self._based_on
        frames = [(gradient(shard, cells, version),) for shard, version in enumerate(based_on)]
        self.machine.push(self._offer(cells), based_on=based_on, frames=frames, now=now)
        self._is_pushed(now)

    def _offer(self, cells: list[int], buffer: int = 0) -> Offer:
        spoilt = not self._scenario.spoilt.isdisjoint(cells)
        return Offer(
            clock_of=self._slot,
            clock=self._clock,
            cells=cells,
            weight=1.0,
            loss=1.0 / self._clock,
            buffer=buffer,
            half=[float(self._clock)],
            found=[float(spoilt)],
        )

    def _is_pushed(self, now: float) -> None:
        assert self._cell is not None
        step = self._cell // self._scenario.num_slots + 1
        self._cell, self._ready_at = None, float("inf")
        if self._saving is not None:
            self._saving.on_step(step, now)

    # Where gradients lie in memory that all share: as `strategies/ps/client.py`.

    def _begin(self, gradients: Gradients) -> None:
        """Take over what another has left, or the buffer in which to compute."""
        assert self._cell is not None
        self._left, slots = None, self.machine.slots
        if slots is not None and slots.is_fresh(self._slot):
            self._left = self._buffers.left_by_another(self._slot, self._clock, self._cell)
        if slots is not None:
            slots.note_pushed(self._slot)
        if self._left is None:
            buffer = self._buffers.buffer_of(self._slot, self._clock)
            self._buffers.begin(buffer)
            gradients.tear(buffer)

    def _push_through(self, gradients: Gradients, now: float) -> None:
        """The next part of the gradient is there; where it may go at once, it does."""
        assert self._cell is not None
        if self._left is not None:
            self._buffers.open(self._offer([self._cell], self._left[0]), None)
            self._complete(now)
            return
        cells, buffer, consistency = (
            [self._cell],
            self._buffers.buffer_of(self._slot, self._clock),
            self.machine.consistency,
        )
        label = Label(self._clock, self._cell, 1.0, 1.0 / self._clock, True, 1.0)
        if not self._parts:
            self._parts = list(range(self._scenario.shards))
            self._buffers.open(self._offer(cells, buffer), label)
        shard = self._parts.pop()
        gradients.parts[buffer, shard] = cells, gradient(shard, cells, self._based_on[shard])
        if consistency.mode not in (Mode.BSP, Mode.QUORUM):
            self._push_part(shard, now)
        self._ready_at = now + self._dice.uniform(*PART_S)
        if not self._parts:
            self._complete(now)

    def _complete(self, now: float) -> None:
        for unsent in self._buffers.complete():
            self._push_part(unsent, now)
        self._is_pushed(now)

    def _push_part(self, shard: int, now: float) -> None:
        based_on = self._based_on[shard]
        self.machine.push_shard(self._buffers.sequence, shard, based_on=based_on, frames=(), now=now)
