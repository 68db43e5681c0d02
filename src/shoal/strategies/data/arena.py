"""Data parallel through the host's shared memory.

A step: every slot's gradients arrive; each worker sums its chunks in slot order and updates them in place; the
step is committed when all chunks are done. The last gradient's arrival decides the step: from then on any
process can finish it, so a killed worker's successor reads the counters and goes on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from shoal.errors import LaunchError, SpecError
from shoal.spec import Data, World
from shoal.strategies.base import Fill, Part, Setting, StepResult, Work
from shoal.strategies.clipping import clip_factor
from shoal.strategies.data.batchnorm import (
    check_setting,
    check_took_part,
    exchange_calls,
    exchange_elements,
    synchronise,
)
from shoal.strategies.data.buffers import MovingBuffers
from shoal.strategies.data.direct import leave, write_directly
from shoal.strategies.data.shared import SharedState, Sizes
from shoal.strategies.data.tap import GradientTap
from shoal.strategies.data.update import SlicedUpdate
from shoal.strategies.data.whole import WholeUpdate
from shoal.strategies.gradients import backward_part, check_weight
from shoal.strategies.optimizer_state import named_state
from shoal.strategies.optimizers import StateSchema, state_schema
from shoal.strategies.replica import Replica


class ArenaData:
    """Parameters and optimizer state once per host, gradients once per slot, no sockets."""

    def __init__(self, spec: Data) -> None:
        self._spec = spec

    def open(self, replica: Replica, setting: Setting) -> None:
        self._replica = replica
        self._setting = setting
        schema = state_schema(replica.optimizer)
        self._sliced = schema is not None
        self._buffers = MovingBuffers(replica.module)
        sizes = Sizes(self._buffers.nbytes, self._exchange_bytes())
        self._shared = SharedState(replica, schema or StateSchema((), ()), setting, sizes)
        self._shared.map()
        self._buffers.bind(self._shared)
        if setting.world.role == "worker":
            self._take_place(setting.world)
            if setting.world.is_first and not self._sliced:
                setting.report(
                    f"{type(replica.optimizer).__name__} does not work element by element: "
                    "worker 0 updates the whole model."
                )

    def _exchange_bytes(self) -> int:
        if self._spec.batchnorm != "sync":
            return 0
        check_setting(self._setting)
        if isinstance(self._replica.optimizer, torch.optim.LBFGS):
            raise SpecError(
                "data: batchnorm=sync needs all workers in every pass, but LBFGS lets worker 0 evaluate the loss "
                "again alone; use batchnorm=local, or another optimizer."
            )
        return 8 * exchange_elements(self._replica.module) * self._setting.extent.accumulate

    def _take_place(self, world: World) -> None:
        """Become the worker of this rank: bind the shared state, own its slots and chunks."""
        shared, replica = self._shared, self._replica
        shared.setting = self._setting = replace(self._setting, world=world)
        self._rank = world.global_rank
        if world.is_first and shared.counters[shared.marks.opened] == 0:
            self._buffers.publish()
        shared.bind()
        self._gradients = {slot: shared.gradient_views(slot) for slot in self._setting.slots_of(self._rank)}
        self._tap = GradientTap(shared.params)
        self._direct = write_directly(replica.module, shared.params, self._tap)
        if self._spec.batchnorm == "sync":
            calls = exchange_calls(replica.module) * self._setting.extent.accumulate
            self._exchange = _Exchange(shared, self._setting.slots_of(self._rank)[0], calls)
            synchronise(replica.module, self._exchange.sum)
        self._update: SlicedUpdate | WholeUpdate = (
            SlicedUpdate(shared, replica, self._rank, journal=self._spec.journal)
            if self._sliced
            else WholeUpdate(shared, replica, self._rank)
        )

    def reform(self, world: World) -> int:
        self._take_place(world)
        done = self._shared.counters[self._shared.marks.updated[self._rank]]
        if done and not self._sliced and self._rank == 0:
            raise LaunchError(
                f"Worker 0 died, and with it the state of {type(self._replica.optimizer).__name__}, which only "
                "it held; start again, or use an optimizer that works element by element, such as AdamW."
            )
        self._shared.counters.wait_all(self._shared.marks.updated, done)
        return done

    def step(self, work: Work) -> StepResult:
        shared, marks, counters, step = self._shared, self._shared.marks, self._shared.counters, work.step
        if work.stop and not counters[marks.stop_at[self._rank]]:
            counters[marks.stop_at[self._rank]] = step
        for part in work.parts:
            if counters[marks.gradients[part.slot]] < step:
                self._fill(work, part)
        counters.wait_all(marks.gradients, step)  # decided: from here on whoever lives can finish the step

        loss, weight, scale, touched = self._totals(work)
        if self._setting.clip_norm is not None:
            scale *= self._clip_coefficient(step, scale, touched)
        if self._rank == 0:
            self._buffers.commit(shared.results[:, 1])
        if isinstance(self._update, SlicedUpdate):
            self._update.run(scale, touched)
        else:
            self._update.run(scale, touched, loss, lambda: self._evaluate_again(work))
        if self._rank == 0 and step < len(shared.losses):
            shared.losses[step] = loss
        counters.publish(marks.updated[self._rank], step)
        counters.wait_all(marks.updated, step)  # committed
        if step < len(shared.losses):
            loss = float(shared.losses[step])  # results may have been written again, by LBFGS in worker 0
        return StepResult(loss, weight, any(0 < counters[mark] <= step for mark in marks.stop_at))

    def _fill(self, work: Work, part: Part) -> None:
        """Compute one slot's gradients where all can read them."""
        shared, marks = self._shared, self._shared.marks
        self._compute(work, part)
        shared.counters[marks.progress[self._rank]] = 0
        shared.counters.publish(marks.gradients[part.slot], work.step)

    def _compute(self, work: Work, part: Part) -> None:
        shared = self._shared
        if part.slot not in self._gradients:
            self._gradients[part.slot] = shared.gradient_views(part.slot)
        self._tap.aim(self._gradients[part.slot], shared.touched[part.slot])
        self._buffers.load()
        if self._spec.batchnorm == "sync":
            self._exchange.begin(work.step)
        loss_sum, weight = backward_part(self._replica, work, part, self._tap.backward)
        if self._spec.batchnorm == "sync":
            check_took_part(weight, work.step)
        shared.results[part.slot] = loss_sum, weight
        self._buffers.store(part.slot)

    def _totals(self, work: Work) -> tuple[float, float, float, Any]:
        """Loss, weight, what to scale summed gradients by, and who touched what where not all touched all."""
        loss_sum = weight = 0.0
        for part_loss, part_weight in self._shared.results.tolist():
            loss_sum, weight = loss_sum + part_loss, weight + part_weight
        check_weight(work, weight)
        scale = 1.0 if work.parts[0].total_weight is not None else 1 / weight
        touched = self._shared.touched
        return loss_sum / weight, weight, scale, None if touched.all() else touched

    def _clip_coefficient(self, step: int, scale: float, touched: Any) -> float:
        marks, counters = self._shared.marks, self._shared.counters
        self._update.measure(scale, touched)
        counters.publish(marks.norms[self._rank], step)
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
        for part in work.all_parts():
            self._compute(work, part)
        self._buffers.commit(self._shared.results[:, 1])
        loss, _, scale, touched = self._totals(work)
        return loss, scale, touched

    def losses(self, last_step: int) -> list[float]:
        return list(self._shared.losses[1 : last_step + 1])

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        shared, marks, counters = self._shared, self._shared.marks, self._shared.counters
        size = shape[0] * shape[1]
        # Tables of earlier calls stay, as far as there is room: a successor finds them filled.
        start = (serial - 1) % self._setting.extent.tables * size
        table = shared.table[start : start + size].view(shape)
        if counters[marks.shared_rows[self._rank]] < serial:
            fill(table)
            counters.publish(marks.shared_rows[self._rank], serial)
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


class _Exchange:
    """Sums over slots inside a forward or backward pass; every exchange of a step has its own place."""

    def __init__(self, shared: SharedState, slot: int, calls_per_step: int) -> None:
        self._shared = shared
        self._slot = slot
        slots = range(shared.setting.slots)
        self._rooms = [shared.segment.tensor(f"exchange/{number}", torch.float64) for number in slots]
        self._per_step = calls_per_step + 1

    def begin(self, step: int) -> None:
        self._step = step
        self._used = self._calls = 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        start, self._used = self._used, self._used + values.numel()
        if self._used > self._rooms[0].numel():
            raise SpecError(
                "data: batchnorm=sync met a BatchNorm layer that runs more than once in a forward pass; "
                "use batchnorm=local for this model."
            )
        self._calls += 1
        marks, counters = self._shared.marks, self._shared.counters
        serial = self._step * self._per_step + self._calls
        self._rooms[self._slot][start : self._used] = values
        if counters[marks.exchanged[self._slot]] < serial:  # a successor repeats what its predecessor published
            counters.publish(marks.exchanged[self._slot], serial)
        counters.wait_all(marks.exchanged, serial)
        total = self._rooms[0][start : self._used].clone()
        for room in self._rooms[1:]:
            total.add_(room[start : self._used])
        return total
