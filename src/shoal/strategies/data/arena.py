"""Data parallel through the host's shared memory.

A step: every slot's gradients arrive; each place's chunks are summed in slot order and updated where they lie; the
step is committed when all chunks are done. The last gradient's arrival decides the step: from then on any
process can finish it, so whoever takes over a killed worker's place reads the counters and goes on.

A place is a rank's share of all this: slots, chunks, journal, counters. There are as many as the job began with; a
process hosts one or more of them, and which ones makes no difference to a single bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from shoal.errors import SpecError
from shoal.feed.parts import Part
from shoal.model.blueprint import Blueprint, model_size
from shoal.model.buffers import MovingBuffers
from shoal.model.optimizer.kinds import StateSchema, state_schema
from shoal.model.optimizer.state import named_state
from shoal.model.replica import Replica
from shoal.spec import Data, World
from shoal.spec.model_size import ModelSize, RunSize
from shoal.spec.vocabulary import Role
from shoal.step.clipping import clip_factor
from shoal.step.compute import SAMPLES, Sums, backward_part, check_weight
from shoal.step.direct import leave, write_directly
from shoal.step.passes import LocalSwap, SlotPasses
from shoal.step.tap import GradientTap
from shoal.step.work import Work
from shoal.strategies.base import Fill, Past, Setting, StepResult, WholeModel, step_result
from shoal.strategies.data.batchnorm import check_pieces, check_took_part, synchronise
from shoal.strategies.data.decision import StepDecision
from shoal.strategies.data.shared import SharedState, arena_grid, cut_of_grid
from shoal.strategies.data.shared_precision import SharedPrecision
from shoal.strategies.data.sizes import size_of_run
from shoal.strategies.data.speed import SpeedShares
from shoal.strategies.data.update import SlicedUpdate
from shoal.strategies.data.whole import WholeUpdate
from shoal.strategies.groups.rooms import RoomSwap


class ArenaData(WholeModel):
    """Parameters and optimizer state once per host, gradients once per slot, no sockets."""

    def __init__(self, spec: Data) -> None:
        self._spec = spec
        self.handover = self
        self._is_joined = False
        """Whether this process is a worker by now."""

    def open(self, replica: Replica, setting: Setting) -> None:
        self._replica = replica
        self._setting = setting
        self._updates: dict[int, SlicedUpdate | WholeUpdate] = {}
        self._gradients: dict[int, list[torch.Tensor]] = {}
        self._decision: StepDecision | None = None
        schema = state_schema(replica.optimizer)
        self._sliced = schema is not None
        self._buffers = MovingBuffers(replica.module)
        if self._spec.batchnorm == "sync":
            check_pieces(setting)
        blueprint = Blueprint.of(replica)
        run = size_of_run(blueprint, replica.precision, setting.extent, setting.slots, setting.world.world_size)
        self._shared = self._lay_out(replica, schema or StateSchema((), ()), model_size(blueprint), run)
        self._shared.map()
        self._shares = SpeedShares(self._shared) if self._spec.shares == "speed" else None
        # What a job does not have (half precision, moving buffers) is not asked about in every step.
        self._precision = SharedPrecision(self._shared, replica.precision) if replica.precision.scales else None
        self._has_buffers = any(True for _ in replica.module.buffers())
        if setting.world.role == Role.WORKER:
            self._join(setting.world)
            self._host(setting.world)
            if setting.world.is_first and not self._sliced:
                setting.company.report(
                    f"{type(replica.optimizer).__name__} does not work element by element: worker 0 updates the "
                    f"whole model{'' if run.image and self._spec.journal else ', and its state goes with it'}."
                )

    def _lay_out(self, replica: Replica, schema: StateSchema, model: ModelSize, run: RunSize) -> SharedState:
        """Where everything lies, the same in every process."""
        cut = cut_of_grid(arena_grid(list(replica.trained.values()), self._setting.clip_norm))
        return SharedState(replica, schema, self._setting, self._spec.segment_regions(model, run, cut))

    def _join(self, world: World) -> None:
        """Become a worker: bind the shared state, and lead gradients there."""
        shared, replica = self._shared, self._replica
        shared.setting = self._setting = replace(self._setting, world=world)
        self._buffers.bind(shared.memory, self._setting.slots)
        if world.is_first and shared.counters[shared.marks.opened] == 0:
            self._buffers.publish()
            if self._precision is not None:
                self._precision.publish(replica.start.step)
        shared.bind()
        self._is_joined = True
        self._lead_gradients()
        replica.precision.bind(replica.module, report=self._setting.company.report if world.is_first else None)
        self._prepare_passes()

    def _lead_gradients(self) -> None:
        """Have backward passes leave gradients where all can read them."""
        params, replica = self._shared.params, self._replica
        self._tap = GradientTap(params)
        self._direct = (
            [] if replica.is_by_sample else write_directly(replica.module, params, self._tap, replica.form)
        )

    def _prepare_passes(self) -> None:
        """Let slots meet in a pass, where the task has them do so."""
        swap = RoomSwap(self._shared.segment, self._setting.slots, self._setting.company.on_idle)
        self._passes = SlotPasses(swap, (self._tap.keep, self._buffers.keep))
        if self._spec.batchnorm == "sync":
            synchronise(self._replica.module, self._passes.asking)

    def _host(self, world: World) -> None:
        """Own the chunks of these places, and of no others."""
        shared, replica = self._shared, self._replica
        shared.setting = self._setting = replace(self._setting, world=world)
        for place in self._updates.keys() - set(world.places):
            del self._updates[place]
        for place in world.places:
            if place not in self._updates:
                self._updates[place] = (
                    SlicedUpdate(shared, replica, place, journal=self._spec.journal)
                    if self._sliced
                    else WholeUpdate(shared, replica, place)
                )

    def reform(self, world: World) -> int:
        is_new = not self._is_joined
        if is_new:
            self._join(world)
        marks, counters = self._shared.marks, self._shared.counters
        done = min(counters[marks.updated[place]] for place in world.places)
        self._host(world)
        if is_new:
            counters.wait_all(marks.updated, done)
        return done

    def take(self, work: Work) -> StepResult:
        marks, counters, step = self._shared.marks, self._shared.counters, work.step
        if self._precision is not None:
            self._precision.begin(step)
        missing = {part.slot: part for part in work.parts if counters[marks.gradients[part.slot]] < step}
        if work.stop and missing:
            self._ask_to_stop(step)
        if self._passes.never_meet:
            for part in missing.values():
                self._fill(work, part)
        else:
            self._passes.run(step, list(missing), lambda slot: self._fill(work, missing[slot]))
        self._await_gradients(step)  # decided: from here on whoever lives can finish the step

        decision = self._decide(work)
        scale = decision.scale
        self._begin_sums(decision)
        if self._setting.clip_norm is not None and decision.is_taken:
            scale *= self._clip_coefficient(step, decision)
        for place, update in self._updates.items():
            if counters[marks.updated[place]] < step:
                self._update_place(work, place, update, scale)
        counters.wait_all(marks.updated, step)  # committed
        return self._result(step, decision)

    def _result(self, step: int, decision: StepDecision) -> StepResult:
        """What a step came to, which is committed."""
        if self._precision is not None:
            self._replica.precision.adopt(decision.half)
        names = self._replica.loss_parts.names
        result = step_result(decision.sums, stop=self._is_stopped_by(step), counts=decision.counts, names=names)
        if step < len(self._shared.losses):
            # Results may have been written again, by LBFGS in worker 0.
            result = replace(result, loss=float(self._shared.losses[step]))
        return result

    def _await_gradients(self, step: int) -> None:
        """Until all slots have left theirs."""
        self._shared.counters.wait_all(self._shared.marks.gradients, step)

    def _begin_sums(self, decision: StepDecision) -> None:
        """What must be done before chunks are summed, where not all slots are in this memory."""

    def _is_stopped_by(self, step: int) -> bool:
        """Whether this step is the last, because somebody has asked for that in time."""
        counters = self._shared.counters
        return any(0 < counters[mark] <= step for mark in self._shared.marks.stop_at)

    def _ask_to_stop(self, step: int) -> None:
        """Let this step be the last. Only while gradients of this process are missing: all must see it in time."""
        mark = self._shared.marks.stop_at[self._setting.world.global_rank]
        if not self._shared.counters[mark]:
            self._shared.counters[mark] = step

    def _fill(self, work: Work, part: Part) -> None:
        """Compute one slot's gradients where all can read them."""
        marks, counters = self._shared.marks, self._shared.counters
        begun = 0.0 if self._shares is None else self._passes.clock()
        samples = int(self._compute(work, part).samples)
        if work.step < len(self._shared.counts):
            self._shared.counts[work.step, part.slot] = samples
        if self._shares is not None:
            self._shares.note(work.step, part.slot, self._passes.clock() - begun, samples)
        for place, update in self._updates.items():
            if part.slot in self._setting.slots_of(place):
                update.begin_step()
        counters.publish(marks.gradients[part.slot], work.step)

    def _compute(self, work: Work, part: Part) -> Sums:
        shared = self._shared
        if part.slot not in self._gradients:
            self._gradients[part.slot] = shared.gradient_views(part.slot)
        self._tap.aim(self._gradients[part.slot], shared.touched[part.slot])
        if self._has_buffers:
            self._buffers.load()
        sums = backward_part(self._replica, work, part, self._backward)
        if self._spec.batchnorm == "sync":
            check_took_part(sums.weight, work.step)
        shared.results[part.slot] = sums.values
        if self._precision is not None:
            self._precision.note(work.step, part.slot, self._taken_gradients(part.slot))
        if self._has_buffers:
            self._buffers.store(part.slot)
        return sums

    def _backward(self, loss: torch.Tensor, share: torch.Tensor | None) -> None:
        self._tap.backward(loss, share)

    def _taken_gradients(self, slot: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that a slot's backward pass has left, by name."""
        named = zip(self._replica.trained, self._gradients[slot], self._shared.touched[slot], strict=True)
        return ((name, view) for name, view, is_touched in named if is_touched)

    def _decide(self, work: Work) -> StepDecision:
        """What the slots' gradients come to, read once per step.

        A step may be taken again because places moved. By then others may be in the next one, and have written
        over their slots' results.
        """
        if self._decision is None or self._decision.step != work.step:
            counts = tuple(int(samples) for samples in self._shared.results[:, SAMPLES].tolist())
            sums, scale, touched = self._totals(work)
            half = self._replica.precision.state if self._precision is None else self._precision.outcome(work.step)
            self._decision = StepDecision(
                step=work.step,
                sums=sums,
                scale=scale,
                touched=touched,
                counts=counts,
                half=half,
                is_taken=half.skipped == self._replica.precision.state.skipped,
            )
        return self._decision

    def _update_place(self, work: Work, place: int, update: SlicedUpdate | WholeUpdate, scale: float) -> None:
        """Update a place's chunks; the first place commits the loss and the moving buffers, too."""
        shared, step, decision = self._shared, work.step, self._decide(work)
        if place == 0:
            if self._has_buffers:
                self._buffers.commit(shared.results[:, 1])
            if self._precision is not None:
                self._precision.commit(step, decision.half)
        if not decision.sums.weight or not decision.is_taken:
            pass  # all of the batch was learnt already, or a gradient is no number
        elif isinstance(update, SlicedUpdate):
            update.run(scale, decision.touched)
        else:
            update.run(step, scale, decision.touched, decision.sums.mean_loss, lambda: self._evaluate_again(work))
        if place == 0 and step < len(shared.losses):
            shared.losses[step] = decision.sums.mean_loss
        shared.counters.publish(shared.marks.updated[place], step)

    def _totals(self, work: Work) -> tuple[Sums, float, Any]:
        """Sums, what to scale summed gradients by, and who touched what where not all touched all."""
        sums = Sums()
        for values in self._shared.results.tolist():
            sums += Sums.of(values)
        check_weight(work, sums)
        is_mean = work.parts[0].total_weight is not None or not sums.weight
        touched = self._shared.touched
        # The reciprocal, then the loss scale, a power of two: servers make the same number (`Shard.scale_of`).
        scale = (1.0 if is_mean else 1 / sums.weight) / self._replica.precision.scale
        return sums, scale, None if touched.all() else touched

    def _clip_coefficient(self, step: int, decision: StepDecision) -> float:
        marks, counters = self._shared.marks, self._shared.counters
        for place, update in self._updates.items():
            if counters[marks.norms[place]] < step:
                update.measure(decision.scale, decision.touched)
                counters.publish(marks.norms[place], step)
        counters.wait_all(marks.norms, step)
        assert self._setting.clip_norm is not None
        return clip_factor(self._shared.norms, self._setting.clip_norm)

    def _evaluate_again(self, work: Work) -> tuple[float, float, Any]:
        """All slots once more at the current parameters, by this process alone."""
        if work.all_parts is None:
            raise SpecError(
                f"{type(self._replica.optimizer).__name__} evaluates the loss several times per step, which "
                "trainer.step(batch) cannot do with several processes; use fit(), or another optimizer."
            )
        parts = {part.slot: part for part in work.all_parts()}
        swap = LocalSwap(self._setting.slots)  # the other processes wait for the end of this step
        self._passes.run(work.step, list(parts), lambda slot: self._compute(work, parts[slot]), swap=swap)
        self._buffers.commit(self._shared.results[:, 1])
        sums, scale, touched = self._totals(work)
        return sums.mean_loss, scale, touched

    @property
    def may_release(self) -> bool:
        return True

    def gather(self) -> bool:
        """All is in memory that everybody has."""
        return True

    def committed(self) -> int:
        counters = self._shared.counters
        return min(counters[mark] for mark in self._shared.marks.updated)

    def losses(self, first: int, last: int) -> list[float]:
        return self._shared.losses[first : last + 1].tolist()

    def sizes(self, step: int) -> tuple[int, ...] | None:
        return None if self._shares is None else self._shares.sizes(step)

    def past(self, first: int, last: int) -> Past:
        steps = slice(first, last + 1)
        sizes = None if self._shares is None else self._shared.sizes[steps]
        return Past(self._shared.counts[steps], sizes, self._is_stopped_by(last))

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        self.settle()
        shared, marks, counters = self._shared, self._shared.marks, self._shared.counters
        table = shared.table_of(serial, shape)
        for place in self._setting.world.places:
            if counters[marks.shared_rows[place]] < serial:
                fill(table, place)
                counters.publish(marks.shared_rows[place], serial)
        counters.wait_all(marks.shared_rows, serial)
        return table.clone()

    def settle(self) -> None:
        self._buffers.load()

    def snapshot(self) -> dict[str, torch.Tensor]:
        return self._shared.whole_state(self._replica) if self._sliced else named_state(self._replica)

    def close(self) -> None:
        if hasattr(self, "_tap"):
            self._tap.close()
            leave(self._direct)
        self._shared.segment.close()
