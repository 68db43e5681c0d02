"""A worker of a served job: servers hold the model, workers fetch it, compute, and push what they found."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch

from shoal.checkpoint.model_stream import TensorStream
from shoal.coordinator.policy import has_diverged
from shoal.errors import Diverged, PeerLost, ShoalError
from shoal.model.replica import Replica
from shoal.ps.shard import sum_by_position
from shoal.spec import ParameterServer, World
from shoal.step.passes import SlotPasses
from shoal.step.work import Work
from shoal.strategies.base import Fill, Setting, StepResult, WholeModel
from shoal.strategies.groups.rooms import RoomSwap
from shoal.strategies.ps.borders import Borders
from shoal.strategies.ps.client import PsClient
from shoal.strategies.ps.contributions import Computed
from shoal.strategies.ps.departure import Departure
from shoal.strategies.ps.making import make_contribute
from shoal.strategies.ps.part_fetching import fetch_by_parts
from shoal.strategies.ps.served import Served
from shoal.strategies.ps.turns import ServedTurn, Turns

DIVERGED_PAUSE_S = 0.25
"""How long a worker whose loss is no number waits before it looks whether the parameters are better."""

_LOOK_UP_EVERY_S = 0.02
"""Whoever waits hears many messages, and need not look up at each."""


class StopRequested(ShoalError):
    """The run is to end while this worker waits for others."""


class Redealt(BaseException):
    """A pass waits for a slot that is now this worker's own. Not for the task's code to catch."""


class ServedModel(WholeModel):
    """One worker's part in training a served model. The first one evaluates and saves for all."""

    def __init__(self, spec: ParameterServer) -> None:
        self._spec = spec

    def open(self, replica: Replica, setting: Setting) -> None:
        spec, world = self._spec, setting.world
        assert setting.supply is not None, "servers are there for training"
        self._setting, self._supply, self._world = setting, setting.supply, world
        self._begun_at = self._reached = replica.start.step
        """The last step that this worker had a part in, or an earlier run took."""
        self._total = setting.extent.total_steps
        self._loss, self._parts = math.nan, dict[str, float]()
        """Of the step above, and what it is told with."""
        self._names = replica.loss_parts
        self._first_loss = replica.start.losses[0] if replica.start.losses else math.nan
        self._is_leaving = False
        self._looked_up_at = 0.0
        workers = len(setting.conduct.fills)
        self.served = Served.open(spec, replica, world, slots=setting.slots, workers=workers)
        self.client = PsClient(self.served, world, self._on_idle)
        self._borders = Borders(self.client, spec, world, slots=setting.slots)
        self._turns = Turns(
            self.client,
            spec,
            world,
            self._borders,
            slots=setting.slots,
            steps=self._total - self._begun_at,
            begun_at=self._begun_at,
        )
        self._contribute = make_contribute(self.served, self.client, self._make_work, world)
        self._passes = self._make_passes() if spec.meets else None
        self.client.scale.bind(setting.company.report, is_first=world.is_first)
        self._departure = Departure(
            in_lockstep=spec.is_lockstep,
            is_first=world.is_first,
            wants_stop=setting.company.wants_stop,
            saves=setting.extent.is_saved,
            is_at_rest=lambda: self._borders.is_at_rest,
            is_used_up=lambda: self._turns.is_used_up,
        )

    def turns(self, first: int, last: int) -> Iterator[ServedTurn]:
        """Its cells, clock by clock; borders, where all are called to one; at last the end of its part."""
        fetch_by_parts(self.client, self._supply)
        try:
            for turn in self._turns:
                if self._is_to_leave():  # it may have been before this worker joined
                    break
                yield turn
                if self._is_to_leave():
                    break
        except StopRequested:
            self._is_leaving = True
        yield ServedTurn(step=self._reached, coming=())

    def take(self, work: Work) -> StepResult:
        turn = work.turn
        assert isinstance(turn, ServedTurn)
        try:
            if turn.is_border:
                return self._stand_still(turn)
            if work.enough and not self._is_leaving:
                self._departure.enough = work.enough
                if not self._departure.meets:
                    self._tell_all_to_stop()
            if not self._is_leaving and turn.is_round:
                return self._close_round(turn)
            if not self._is_leaving and turn.cells:
                return self._step(turn, wants_border=work.save)
            self.client.finish()
            return self._leave() if self._is_leaving else self._end()
        except StopRequested:
            return self._leave()

    # A step.

    def _step(self, turn: ServedTurn, *, wants_border: bool) -> StepResult:
        """Compute and push; where the loss is no number, wait for the coordinator to roll back, and try again."""
        try:
            parts = self._compute_and_push(turn)
        except Diverged:
            if self._spec.is_lockstep or self._spec.diverging == "ignore":
                raise
            self.client.report(loss=math.nan)
            self.client.pause(DIVERGED_PAUSE_S)
            self._turns.is_void = True
            return self._nothing_new()
        except Redealt:
            self._turns.is_void = True
            return self._nothing_new()
        result = self._complete(turn.clock, parts)
        if wants_border and not self._spec.is_lockstep and self._reached < self._total:
            self._borders.bring_about()
        if self._is_wished() and self._departure.calls_all():
            self._borders.call_all()
        return result

    def _compute_and_push(self, turn: ServedTurn) -> list[Computed]:
        """Each slot's cells are one push."""
        begun = time.monotonic()
        by_slot: dict[int, list[int]] = {}
        for cell in turn.cells:
            by_slot.setdefault(self._slot_for(cell), []).append(cell)
        self._departure.is_in_step = True
        moving = self.served.moving
        committed = moving.own.clone() if moving.nbytes and len(by_slot) > 1 else None

        def contribute(slot: int) -> Computed:
            if committed is not None:  # every slot starts from the same moving buffers
                moving.own.copy_(committed)
            return self._contribute(turn.clock, by_slot[slot], slot)

        if self._passes is None or self._passes.never_meet:
            parts = [contribute(slot) for slot in by_slot]
        else:
            parts = self._passes.run(turn.step, list(by_slot), contribute)
        self.client.report(samples_per_s=sum(part.weight for part in parts) / max(time.monotonic() - begun, 1e-9))
        return parts

    def _make_passes(self) -> SlotPasses:
        """In which slots can meet: what they bring lies beside what they push."""
        memory, moving = self.served.memory, self.served.moving
        swap = RoomSwap(memory.segment, self._setting.slots, on_idle=self._look_up_in_pass)
        return SlotPasses(swap, (self.client.tap.keep, moving.keep))

    def _look_up_in_pass(self) -> None:
        """While a slot waits for another that has come to this worker: it is to be computed with this one."""
        self.client.hear(0.0)
        if self.client.machine.slots is not None and self.client.machine.slots.is_given_more:
            raise Redealt

    def _complete(self, clock: int, parts: list[Computed]) -> StepResult:
        """What was pushed is on its way: say so, and where all go on together wait for it."""
        loss, weight = sum(part.loss for part in parts), sum(part.weight for part in parts)
        mean = loss / weight if weight else math.nan
        told_means: list[float] = []
        if self._names.names:
            rows = sum_by_position(part.loss_parts for part in parts if part.weight)
            told_means = [told / weight for told in rows]
        step = self._turns.step_of(max(cell for part in parts for cell in part.cells))
        if math.isnan(self._first_loss):
            self._first_loss = mean
            self.client.report(first_loss=mean)
        self.client.report(step=step, loss=mean)
        if self.served.consistency.gathers(clock):
            if not self.client.await_round(clock):
                self._turns.open_clock = clock
                return self._nothing_new(weight)
            mean, told_means = self._conclude_round(step)
        return self._is_done(step, mean, told_means, weight)

    def _close_round(self, turn: ServedTurn) -> StepResult:
        """Wait once more for the others' part of a round: this worker has had to look after its slots before."""
        if not self.client.await_round(turn.clock):
            return self._nothing_new()
        return self._is_done(turn.step, *self._conclude_round(turn.step), 0.0)

    def _conclude_round(self, step: int) -> tuple[float, list[float]]:
        """A round is closed: its mean loss, and what that is told with."""
        self._turns.open_clock = 0
        if self.client.scale.matters:
            self.client.scale.follow_round(step)
        return self.client.machine.rounds_loss, self.client.machine.rounds_loss_parts

    def _nothing_new(self, weight: float = 0.0) -> StepResult:
        return StepResult(self._loss, weight, False, done=self._begun_at)

    def _is_done(self, step: int, mean: float, told_means: list[float], weight: float) -> StepResult:
        named = dict(zip(self._names.names, told_means, strict=False))
        if step > self._reached:
            self._reached, self._loss, self._parts = step, mean, named
        self._departure.is_in_step = False
        # The last step is done when all are done with it, which is a turn of its own.
        done = step if step < self._total else self._begun_at
        return StepResult(mean, weight, False, done=done, cells=self._committed_cells(), parts=named)

    def _make_work(self, step: int, slots: range, *, apart: bool) -> Work:
        return self._supply.work(self._begun_at + step, slots, apart=apart)

    def _slot_for(self, cell: int) -> int:
        """Whose buffers take what is computed on a cell: what goes into the same ones is pushed together."""
        if self._spec.is_leased:
            return self._world.global_rank
        slots = self._setting.slots
        return (
            cell % slots if self._spec.via == "direct" else self._setting.slots_of(self._world.global_rank).start
        )

    def _committed_cells(self) -> int | None:
        """What all workers together have trained on, as far as is known here; None where they go in lockstep."""
        if self.served.consistency.next_gathered(0) is not None:
            return None
        machine, slots = self.client.machine, self._setting.slots
        if machine.leases is not None:
            return self._begun_at * slots + machine.leases.committed
        steps = self._begun_at + min(link.floor for link in machine.links) * self._spec.every
        return min(steps, self._total) * slots

    # Borders, and the end.

    def _stand_still(self, turn: ServedTurn) -> StepResult:
        """All are at one border. Where the run is to end with it, nobody goes on from here."""
        is_last = self._departure.calls_all()
        if is_last and self._departure.enough:
            self._tell_all_to_stop()
        if is_last:
            self._is_leaving = self._departure.is_over = True
        reason, facts = self._why_it_ends, self._facts() if is_last else {}
        return StepResult(self._loss, 0.0, is_last, reason=reason, waited_s=turn.waited_s, facts=facts)

    def _is_wished(self) -> bool:
        """Whether somebody has asked for the end: only then it matters how this worker departs."""
        return bool(self._departure.enough) or self._setting.company.wants_stop()

    def _is_to_leave(self) -> bool:
        if not self._is_leaving and self._is_wished():
            self._is_leaving = self._departure.is_due_at_border()
        return self._is_leaving

    def _tell_all_to_stop(self) -> None:
        self._is_leaving = True
        self.client.ask_to_stop(self._departure.enough)

    def _end(self) -> StepResult:
        """This worker has used up what was its own. The first one waits for the others, and so does whoever goes
        on with what all have trained."""
        loss, done = self._loss, self._reached
        if self._world.is_first or self._setting.extent.is_kept:
            self._await_others()
            if done < self._total and self._turns.leaves_out_the_late:
                loss = self.client.machine.rounds_loss
            elif math.isnan(loss) and (leases := self.client.machine.leases) is not None and leases.loss:
                (loss,) = leases.loss  # the others were so quick that none was left to this one
            done = self._total
        if self._world.is_first:
            self._warn_if_diverged(loss)
        self._departure.is_over = True
        self._check_alive()
        self._keep()
        return StepResult(loss, 0.0, False, done=done, facts=self._facts(), parts=self._parts)

    def _await_others(self) -> None:
        """Others may still train on the last cells."""
        if self.served.host is not None and self._spec.is_leased:
            self.client.await_cells((self._total - self._begun_at) * self._setting.slots)

    def _leave(self) -> StepResult:
        """The run ends before its time."""
        self._is_leaving = self._departure.is_over = True
        self._check_alive()
        self._keep()
        done, is_whole = self._reached, self.client.machine.is_ready and not self._departure.is_in_step
        if self._world.is_first and is_whole and self._spec.is_lockstep:
            # A successor that comes when all have stopped has taken no step itself.
            done = max(done, self._begun_at + (self.client.next_open_round - 1) * self._spec.every)
        return StepResult(
            self._loss, 0.0, True, reason=self._why_it_ends, done=done, is_whole=is_whole, facts=self._facts()
        )

    @property
    def _why_it_ends(self) -> str:
        return "plateau" if self.client.is_told_to_stop else "stopped"

    def _keep(self) -> None:
        """Others may have pushed since this worker fetched: who goes on with the model takes it as it is now."""
        if self._setting.extent.is_kept:
            self.settle()

    def _check_alive(self) -> None:
        if (why := self.client.failure) is not None:
            # Shards stand at different moments: what could be fetched now is nobody's model.
            raise PeerLost(f"The coordinator has ended the run: {why}")

    def _warn_if_diverged(self, loss: float) -> None:
        """A run may be over before the coordinator has seen enough to act."""
        if math.isnan(self._first_loss) or self._spec.is_lockstep:
            return
        if has_diverged(loss, first=self._first_loss):
            self._setting.company.warn(
                f"the run diverged: its loss began at {self._first_loss:.4g} and ended at {loss:.4g}; lower "
                "the learning rate, or set clip_norm"
            )

    def _on_idle(self) -> None:
        if self.client.is_held:
            self._borders.speak()
        now, on_idle = time.monotonic(), self._setting.company.on_idle
        if on_idle is not None and now - self._looked_up_at > _LOOK_UP_EVERY_S:
            self._looked_up_at = now
            on_idle()
            self.client.follow_coordinator(self._setting.company.moved_coordinator())
        if self._departure.is_over or not self.client.machine.is_ready:
            return  # A successor joins first: what was to be saved at the end may be left to it.
        is_wished = self._is_wished()
        if is_wished and self._departure.calls_all():
            self._borders.call_all()
        is_due = is_wished and self._departure.is_due_while_waiting()
        if is_due or (self.client.is_told_to_stop and not self._is_leaving):
            raise StopRequested("The run was asked to stop.")

    # What others read.

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        """The first worker evaluates alone, while the others go on."""
        self.settle()
        table = torch.zeros(shape, dtype=torch.float64)
        fill(table, 0)
        return table

    def settle(self) -> None:
        if self.client.machine.is_ready:
            self.client.puller.fetch()

    def model_stream(self, replica: Replica) -> TensorStream:
        if self.client.machine.is_ready:
            self.client.puller.fetch_exactly()
        return TensorStream.of(replica.module.state_dict())

    def snapshot(self) -> dict[str, torch.Tensor]:
        clock = (self._reached - self._begun_at) // self._spec.every if self._spec.is_lockstep else None
        return self.client.puller.snapshot() | self.client.codecs.put_aside(after=clock)

    def _facts(self) -> dict[str, Any]:
        """How this worker's pushes travelled, and whose its scale is."""
        wire, scale = self.client.codecs.facts(), self.client.scale.facts()
        if self.served.shares_memory:
            return {"wire": {"kind": "memory"}, **scale}
        if self._world.is_first and wire["raw_bytes"] and self._spec.compress != "none":
            self._setting.company.report(
                f"compress={wire['compress']}: pushes took {wire['ratio']:.3g} of their bytes on the wire"
            )
        return {"wire": {"kind": "tcp", **wire}, **scale}

    def close(self) -> None:
        self._contribute.close()
        self.client.close()


def make(spec: ParameterServer, world: World, slots: int, *, replaceable: bool = False) -> ServedModel:
    """A worker's; servers and coordinator have roles of their own."""
    return ServedModel(spec)
