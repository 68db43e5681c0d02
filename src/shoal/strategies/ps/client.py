"""A worker of a served job: waits for its turn, fetches the parameters, pushes what it computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.comm.codec import Frame
from shoal.errors import LaunchError
from shoal.ps.buffers import Buffers, Label
from shoal.ps.dealing import SlotHolder
from shoal.ps.leasing import LeaseHolder
from shoal.ps.link import Offer
from shoal.ps.node import Node, open_wire
from shoal.ps.rules import Together
from shoal.ps.worker import WorkerMachine
from shoal.spec import World
from shoal.spec.served_footprint import BUFFERS_PER_SLOT
from shoal.spec.update_path import cells_ahead
from shoal.step.direct import leave, write_directly
from shoal.step.tap import GradientTap
from shoal.strategies.ps.bulk import frames_of
from shoal.strategies.ps.contribution import Contribution
from shoal.strategies.ps.norms import WorkerClip
from shoal.strategies.ps.puller import Puller
from shoal.strategies.ps.push_codecs import PushCodecs
from shoal.strategies.ps.scaling import WorkerScale
from shoal.strategies.ps.served import Served

_TICK_S = 0.05


class PsClient:
    """The worker's end of the parameter server. `on_idle` is called while it waits, and raises to give up."""

    def __init__(self, served: Served, world: World, on_idle: Callable[[], None]) -> None:
        self.served = served
        self._on_idle = on_idle
        wire = open_wire(world, served.listens_at(world))
        now, is_leased = time.monotonic(), served.spec.is_leased
        slots = None if is_leased else SlotHolder(world.node)
        self.machine = WorkerMachine(
            node=world.node,
            rank=world.global_rank,
            num_shards=len(served.placement.shards),
            first_shard=served.host or 0,
            consistency=served.consistency,
            now=now,
            address=wire.address,
            leases=LeaseHolder(now=now, ahead=cells_ahead(served.spec)) if is_leased else None,
            slots=slots,
            bulk=0 if served.shares_memory else served.memory.grid.nbytes,
        )
        self._node = Node(world.node, self.machine, wire, world.coordinator_address)
        self.puller = Puller(served, self.machine, self.wait, lambda: self.hear(0.001))
        self.codecs = PushCodecs(
            "none" if served.shares_memory else served.spec.compress,
            served.memory,
            world,
            slots=served.memory.num_buffers // BUFFERS_PER_SLOT,
            kept=served.spec.kept_pushes,
            saved=served.replica.start.aside,
        )
        self.tap = GradientTap(served.memory.params)
        self._direct = write_directly(served.replica.module, served.memory.params, self.tap, served.replica.form)
        clip_norm = served.replica.task.clip_norm if served.spec.push == "gradients" else None
        self._clip = None if clip_norm is None else WorkerClip(served.memory, clip_norm)
        self._views: dict[int, list[torch.Tensor]] = {}
        self._touched: dict[int, Any] = {}
        self.scale = WorkerScale(served, self.machine, self.views)
        self._buffers = Buffers(
            self.machine, served.memory.labels, (lambda _: world.generation) if slots is None else slots.life_of
        )
        self._params_of = [
            {piece.param for block in blocks for piece in block.chunk.pieces} for blocks in served.memory.blocks
        ]
        self._shards_of = [
            [shard for shard, params in enumerate(self._params_of) if number in params]
            for number in range(len(served.memory.params))
        ]
        self._awaited: list[int] = []
        """By shard: gradients that the open push still waits for."""
        self._open: Contribution
        """The push under way."""
        self._replaces = world.generation > 0
        self.beginning: int | None = None
        """The clock that this worker begins as soon as others let it: there a hold finds it."""

    def join(self) -> int:
        """Become a member; returns the first clock of this rank, where cells are leased."""
        if self._replaces and self.served.rules.together is Together.CHANGES:
            raise LaunchError(
                "A worker died, and agree=scatter-sum cannot replace it, for not every copy knows what it pushed; "
                "use agree=allreduce, or servers=N, which can."
            )
        self.wait(lambda: self.machine.is_ready)
        self.scale.catch_up()
        return self.machine.completed() + 1

    @property
    def is_redealt(self) -> bool:
        """Whether this worker is to have other slots than it has: between two steps it gives and takes."""
        return self.machine.slots is not None and self.machine.slots.is_behind

    def follow_deal(self) -> None:
        """Have the slots that are this worker's own. What was pushed for others is safe everywhere by then."""
        if not self.machine.is_dealt:
            self.wait(lambda: self.machine.follow_deal(time.monotonic()))
            self.scale.catch_up()  # There may have been rounds without this worker.

    def inherited(self, clock: int, cell: int, slot: int) -> Contribution | None:
        """What the worker that had this slot before made of a cell, if it came so far.

        Some shards may have it and others not; all must get the same, and those that have it may be a round ahead:
        it cannot be made again. Not where cells are leased: what was pushed together with others' gradients may be
        somebody else's to do now. Nor on another host than the one it lies on.
        """
        slots = self.machine.slots
        if slots is None or not slots.is_fresh(slot):
            return None
        if (left := self._buffers.left_by_another(slot, clock, cell)) is None:
            return None
        buffer, label = left
        return Contribution(
            clock=clock,
            cells=[cell],
            buffer=buffer,
            weight=label.weight,
            loss=label.loss,
            scaled=label.scaled,
            scale=label.scale,
            is_inherited=True,
        )

    def begin(self, clock: int) -> bool:
        """Wait until consistency lets this step begin, and let the replica use the newest parameters; False where
        slots are to be given or taken first, for which others may wait."""
        self.beginning, ahead = clock, self.served.spec.ahead
        self.wait(lambda: self.machine.outstanding <= ahead)
        if self.machine.slots is not None:
            self.wait(lambda: self.is_redealt or self.machine.may_start(clock))
        if not self.is_redealt:
            self.puller.begin(clock)
        self.beginning = None
        return not self.is_redealt

    @property
    def next_open_round(self) -> int:
        """The first clock that is not closed on every shard."""
        return 1 + min(link.rounds for link in self.machine.links)

    def await_round(self, clock: int) -> bool:
        """Wait until the round of this clock is closed on every shard; False where this worker has got another
        slot, without which it may never be.

        A worker may be missing for it that a hold has stopped: who waits here is past this clock, so the border is
        no earlier, and the other comes to it.
        """
        slots, links = self.machine.slots, self.machine.links
        before, self.beginning = self.beginning, clock + 1

        def is_closed() -> bool:
            return all(link.rounds >= clock for link in links)

        self.wait(lambda: is_closed() or (slots is not None and slots.is_given_more))
        self.beginning = before
        return is_closed()

    def await_cells(self, cells: int) -> None:
        """Wait until this worker's shards have seen so many cells; a copy, also what others were pushed."""
        self.wait(lambda: all(link.seen >= cells for link in self.machine.links))

    def take_cells(self, count: int, *, unless: Callable[[], bool]) -> list[int] | None:
        """The next cells of the data, fewer at the end; None when all of it has been trained on.

        An empty list where none can be had now, but others must not wait for this rank: a matter for `tick`. Or
        `unless` has come true, which it does only while none is at hand.
        """
        leases, cells = self.machine.leases, list[int]()
        assert leases is not None
        patient_until = time.monotonic() + _TICK_S

        def is_full() -> bool:
            return len(cells) == count or leases.is_closed(cells)

        def is_decided() -> bool:
            while not is_full() and (cell := leases.take(time.monotonic())) is not None:
                cells.append(cell)
            is_awaited = self.machine.consistency.waits and time.monotonic() >= patient_until
            return is_full() or leases.is_over or (leases.is_dry and (bool(cells) or is_awaited)) or unless()

        self.wait(is_decided)
        self._node.pump(0.0)
        return None if leases.is_over and not cells else cells

    def tick(self, clock: int) -> None:
        """Take a step without data."""
        self.wait(lambda: self.machine.may_start(clock))
        sequence = self.machine.open_push(
            Offer(clock_of=self.machine.rank, clock=clock, cells=[], weight=0.0, loss=0.0)
        )
        for shard in self.machine.unsent(sequence):
            self.machine.push_shard(sequence, shard, based_on=0, frames=(), now=time.monotonic())

    def aim(self, slot: int, clock: int) -> int:
        """Let gradients go to a buffer of this slot that no server reads any more; its number."""
        buffer = self._buffers.buffer_of(slot, clock)
        if not self._buffers.is_free(buffer):
            self.wait(lambda: self._buffers.is_free(buffer))
        self._buffers.begin(buffer)
        self.tap.aim(self.views(buffer), self._touched[buffer])
        return buffer

    def views(self, buffer: int) -> list[torch.Tensor]:
        """A buffer of gradients, by parameter."""
        if buffer not in self._views:
            self._views[buffer] = self.served.memory.views(f"gradients/{buffer}")
            self._touched[buffer] = self.served.memory.touched(buffer).numpy()
        return self._views[buffer]

    def offer_parameters(self, slot: int, clock: int) -> int:
        """Put this worker's own parameters where a gradient would go; the buffer's number."""
        buffer = self.aim(slot, clock)
        self.served.memory.touched(buffer).fill_(1)
        for view, param in zip(self._views[buffer], self.served.memory.params, strict=True):
            view.copy_(param.data)
        return buffer

    def push(self, made: Contribution) -> None:
        """Push what was computed; it is kept until every shard has acknowledged it."""
        if self.scale.matters:
            made = self.scale.judge(made)
        self.open_push(made, clip=self._clip_factor(made))
        self.complete_push()

    def open_push(self, made: Contribution, *, clip: float = 1.0) -> None:
        """Name a push. From now on a shard's part goes out when the gradients of all its parameters are there."""
        label = None
        if not made.is_inherited:
            if self.served.moving.are_there:
                self.served.memory.moved(made.buffer).copy_(self.served.moving.gather())
            label = Label(made.clock, made.cells[0], made.weight, made.loss, made.scaled, made.scale)
        slot = made.buffer // BUFFERS_PER_SLOT
        if self.machine.slots is not None:
            self.machine.slots.note_pushed(slot)
        if self.codecs.leaves_some:
            self.codecs.begin(slot, made.clock)
        offer = Offer(
            clock_of=slot,
            clock=made.clock,
            cells=made.cells,
            weight=made.weight,
            loss=made.loss,
            scaled=made.scaled,
            scale=made.scale * clip,
            buffer=made.buffer,
            half=made.half,
            found=made.seen.values if made.seen is not None else (),
            loss_parts=made.loss_parts,
        )
        self._open = made
        self._buffers.open(offer, label)
        self._awaited = [len(params) for params in self._params_of]

    def on_gradient(self, param: int) -> None:
        """A parameter's gradient is complete."""
        for shard in self._shards_of[param]:
            self._awaited[shard] -= 1
            if self._awaited[shard] == 0:
                self._push_shard(shard)
                self._node.flush()

    def complete_push(self) -> None:
        """All of it is there: push what has not gone out yet."""
        for shard in self._buffers.complete():
            self._push_shard(shard)
        if self.codecs.leaves_some:
            self.codecs.end(self._open.buffer // BUFFERS_PER_SLOT)
        self._node.pump(0.0)

    def _push_shard(self, shard: int) -> None:
        made = self._open
        frames: Sequence[Frame] = ()
        if not self.served.shares_memory:
            compression = None if made.is_spoilt else self.codecs.of(made.buffer // BUFFERS_PER_SLOT)
            frames = frames_of(self.served.memory, shard, made.buffer, compression)
        self.machine.push_shard(
            self._buffers.sequence,
            shard,
            based_on=self.puller.based_on[shard],
            frames=frames,
            now=time.monotonic(),
        )

    def _clip_factor(self, made: Contribution) -> float:
        """Servers clip what they gather; what is an update of its own is clipped here."""
        if self._clip is None or self.served.consistency.gathers(made.clock) or made.is_spoilt:
            return 1.0
        mean = 1.0 if made.scaled else 1.0 / made.weight if made.weight else 0.0
        return self._clip.factor(made.buffer, mean * made.scale)

    def finish(self) -> None:
        """Wait until everything pushed is safe."""
        self.wait(lambda: self.machine.outstanding == 0)

    def have_all(self, clock: int) -> bool:
        """Whether every slot has come this far on every shard."""
        if self.served.consistency.gathers(clock):
            return all(link.rounds >= clock for link in self.machine.links)
        return all(link.floor >= clock for link in self.machine.links)

    def await_all(self, clock: int) -> bool:
        """Wait until every slot has come this far on every shard; False where slots are to be given or taken
        first, or this worker is out."""
        self.wait(lambda: self.have_all(clock) or self.is_redealt or self.machine.is_out)
        return self.have_all(clock)

    @property
    def is_told_to_stop(self) -> bool:
        """Whether training is to end now: it is good enough, or the run has failed."""
        return "stop" in self.settings

    @property
    def is_held(self) -> bool:
        """Whether all are to come to one border."""
        return "hold" in self.settings

    @property
    def failure(self) -> str | None:
        """Why the coordinator has given the run up; None where it has not."""
        return str(self.settings["stop"]) if self.settings.get("failed") else None

    def ask_to_stop(self, reason: str) -> None:
        """Let all workers end, and wait until that is decided."""
        self.machine.facts["stop"] = reason
        self.wait(lambda: self.is_told_to_stop)

    @property
    def settings(self) -> dict[str, Any]:
        """What the coordinator has adjusted."""
        return {} if self.machine.view is None else self.machine.view.settings

    def pause(self, seconds: float) -> None:
        """Do nothing but hear the news for a while."""
        until = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= until)

    def hear(self, seconds: float) -> None:
        """Take in news, waiting so long for them at most."""
        self._node.pump(seconds)
        self._on_idle()

    def follow_coordinator(self, address: str) -> None:
        """Look for the coordinator there, where it has moved."""
        if address:
            self._node.follow_coordinator(address)

    def report(self, **facts: float) -> None:
        """What the coordinator is told several times a second."""
        self.machine.facts.update(facts)

    def close(self) -> None:
        """Leave; the replica keeps its last values."""
        self.tap.close()
        self.puller.close()
        leave(self._direct)
        self.machine.say_done(time.monotonic())
        self._node.flush()
        self._node.close()

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Hear the news until something has come true."""
        self._node.wait(is_done, self._on_idle)
