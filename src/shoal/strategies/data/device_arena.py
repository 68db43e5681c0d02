"""Data parallel among processes that share one GPU, through its memory.

As in the host's arena (`arena.py`) there are places, slots and counters, and any process can go on where another
was killed. What differs is that a GPU is asked, and does it later: a slot's gradients count when the GPU has come
to them, and until then nobody is told. One place, the last, updates the whole model: whoever hosts it computes the
last slot, too, and asks for the update on the same stream, without waiting in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from shoal.arena.device import DeviceDriver
from shoal.errors import SpecError
from shoal.feed.parts import Part
from shoal.model.optimizer.kinds import StateSchema
from shoal.model.replica import Replica
from shoal.spec import Data, World
from shoal.spec.device_footprint import device_regions, host_regions
from shoal.spec.model_size import ModelSize, RunSize
from shoal.step.compute import DeferredSums, EagerCompute, Sums, check_weight, compute_of, seed_slot
from shoal.step.half_weights import HalfWeights, half_weights
from shoal.step.work import Work
from shoal.strategies.base import Setting, StepResult
from shoal.strategies.data.arena import ArenaData
from shoal.strategies.data.device_shared import DeviceState, device_grid, open_memory
from shoal.strategies.data.device_update import DeviceUpdate
from shoal.strategies.data.shared import SharedState, cut_of_grid
from shoal.strategies.data.turns import GpuTurns


@dataclass(frozen=True)
class OpenSlot:
    """A slot whose passes the GPU may still be at."""

    number: int
    found: DeferredSums


class DeviceArenaData(ArenaData):
    """Parameters, optimizer state and slots' gradients once per GPU."""

    def __init__(self, spec: Data, make_driver: Callable[[str], DeviceDriver] | None = None) -> None:
        super().__init__(spec)
        self._make_driver = make_driver or _cuda_driver
        self._update: DeviceUpdate | None = None
        """Of the whole model, where this process hosts the last place."""
        self._asked = 0
        """The last step whose update was asked for before anybody knew its loss."""
        self._turns = GpuTurns()

    def open(self, replica: Replica, setting: Setting) -> None:
        super().open(replica, setting)
        task = replica.task
        # What comes next depends on what is found there, or would have to be put back, too.
        self._looks = self._precision is not None or self._has_buffers or task.skip_loss_below is not None

    def _lay_out(self, replica: Replica, schema: StateSchema, model: ModelSize, run: RunSize) -> SharedState:
        if not self._sliced:
            raise SpecError(
                f"data: {type(replica.optimizer).__name__} does not work element by element, as via=arena wants "
                "it on a GPU; use via=backend, or an optimizer such as AdamW."
            )
        cut = cut_of_grid(device_grid(list(replica.trained.values())))
        regions = device_regions(model, run, cut, journals=self._spec.journal)
        memory = open_memory(self._make_driver(replica.device), self._setting.world, regions)
        self._device = DeviceState(replica, schema, self._setting, host_regions(model, run, cut), memory)
        return self._device

    def _join(self, world: World) -> None:
        self._device.map_device(world)
        super()._join(world)

    def _lead_gradients(self) -> None:
        """They are copied from where autograd leaves them, all at once."""

    def _prepare_passes(self) -> None:
        """Slots do not meet: they are computed one after the other."""
        compute = compute_of(self._replica)
        self._halves: HalfWeights | None = None
        if self._replica.device != "cpu" and isinstance(compute, EagerCompute):
            self._halves = compute.halves = half_weights(self._replica)

    def _host(self, world: World) -> None:
        self._shared.setting = self._setting = replace(self._setting, world=world)
        last = world.world_size - 1
        if last not in world.places:
            self._update = None
        elif self._update is None:
            self._update = DeviceUpdate(self._device, self._replica, last, journal=self._spec.journal)
            self._update.recover()

    # A step.

    def _fill_all(self, work: Work) -> None:
        """Compute the gradients of this process's slots, in their order."""
        marks, counters, step = self._shared.marks, self._shared.counters, work.step
        missing = [part for part in work.parts if counters[marks.gradients[part.slot]] < step]
        if work.stop and missing:
            self._ask_to_stop(step)
        asked: list[OpenSlot] = []
        begun = time.perf_counter()
        for part in sorted(missing, key=lambda part: part.slot):
            loaded = self._loaded(work, part)  # while others have the GPU
            if self._turns.are_taken and self._is_preceded(part.slot, step, asked):
                self._finish(work, asked, begun)
                asked = []
                counters.wait(self._device.nearly[part.slot - 1], step)
                begun = time.perf_counter()
            if self._update is not None:
                self._update.prepare()
            asked.append(self._ask(work, loaded))
        if self._update is not None and asked and not self._looks and self._are_last(asked, step):
            self._update_ahead(work, asked)
        self._finish(work, asked, begun)

    def _is_preceded(self, slot: int, step: int, asked: Sequence[OpenSlot]) -> bool:
        """Whether another process computes the slot before this one."""
        is_own = any(each.number == slot - 1 for each in asked)
        return slot > 0 and not is_own and self._shared.counters[self._shared.marks.gradients[slot - 1]] < step

    def _loaded(self, work: Work, part: Part) -> Part:
        """The same with its batches at hand."""
        seed_slot(work, part.slot, self._replica.device)  # what is loaded may draw numbers
        loaded = list(part.load())
        return Part(part.slot, lambda: iter(loaded), part.total_weight)

    def _ask(self, work: Work, part: Part) -> OpenSlot:
        """Ask for a slot's passes, whose gradients go where all can read them."""
        shared, slot = self._shared, part.slot
        if slot not in self._gradients:
            self._gradients[slot] = shared.gradient_views(slot)
        if self._has_buffers:
            self._buffers.load()
        for param in shared.params:
            param.grad = None
        by_param = list(zip(shared.params, self._gradients[slot], strict=True))
        if self._halves is not None:
            self._halves.rooms = {id(param): view for param, view in by_param}
        found = compute_of(self._replica).run(work, part)
        shared.touched[slot] = [param.grad is not None for param in shared.params]
        elsewhere = [(view, p.grad) for p, view in by_param if p.grad is not None and p.grad is not view]
        if elsewhere:
            torch._foreach_copy_([view for view, _ in elsewhere], [_dense(grad) for _, grad in elsewhere])
        for param in shared.params:
            param.grad = None
        if self._has_buffers:
            self._buffers.store(slot)
        return OpenSlot(slot, found)

    def _finish(self, work: Work, asked: Sequence[OpenSlot], begun: float) -> None:
        """Wait for the GPU, and tell all that these slots' gradients are there."""
        if not asked:
            return
        shared, step, now = self._shared, work.step, time.perf_counter()
        # A loss is known when its forward pass is done, and all that follows from it before the gradients are.
        for slot in asked:
            sums = slot.found.resolve()
            shared.results[slot.number] = sums.values
            if step < len(shared.counts):
                shared.counts[step, slot.number] = int(sums.samples)
        if self._asked == step:
            self._decide(work)
        last = asked[-1].number
        if self._turns.are_taken and last + 1 < self._setting.slots:
            self._device.await_nearly_all(now + self._turns.soon_s)
            shared.counters.publish(self._device.nearly[last], step)
        shared.finish_writes()
        self._turns.note(now - begun, time.perf_counter() - now)
        for slot in asked:
            if self._precision is not None:
                self._precision.note(step, slot.number, self._taken_gradients(slot.number))
            for mark in (shared.marks.gradients[slot.number], self._device.nearly[slot.number]):
                if shared.counters[mark] < step:
                    shared.counters.publish(mark, step)

    # Its update.

    def _are_last(self, asked: Sequence[OpenSlot], step: int) -> bool:
        """Whether nobody who computes another slot waits for these."""
        own = [slot.number for slot in asked]
        missing = [
            slot
            for slot, mark in enumerate(self._shared.marks.gradients)
            if slot not in own and self._shared.counters[mark] < step
        ]
        return max(missing, default=-1) < min(own)

    def _update_ahead(self, work: Work, asked: Sequence[OpenSlot]) -> None:
        """Ask for the update once all others' gradients are there, before it is known what these slots come to:
        their weights are."""
        assert self._update is not None
        others = set(range(self._setting.slots)) - {slot.number for slot in asked}
        for slot in sorted(others):
            self._shared.counters.wait(self._shared.marks.gradients[slot], work.step)
        own = {slot.number: slot.found.weight for slot in asked}
        weights = [own.get(slot, row[1]) for slot, row in enumerate(self._shared.results.tolist())]
        weight = sum(weights)
        check_weight(work, Sums(weight=weight))
        is_mean = work.parts[0].total_weight is not None
        touched = self._shared.touched
        self._update.run(work.step, 1.0 if is_mean else 1 / weight, None if touched.all() else touched)
        self._asked = work.step

    def take(self, work: Work) -> StepResult:
        shared, step = self._shared, work.step
        if self._precision is not None:
            self._precision.begin(step)
        self._fill_all(work)
        self._await_gradients(step)  # decided: from here on whoever lives can finish the step
        decision = self._decide(work)
        for place in self._setting.world.places:
            if shared.counters[shared.marks.updated[place]] < step:
                if place == self._setting.world.world_size - 1:
                    self._commit(work)
                shared.counters.publish(shared.marks.updated[place], step)
        shared.counters.wait_all(shared.marks.updated, step)  # committed
        return self._result(step, decision)

    def _commit(self, work: Work) -> None:
        """The step of the whole model; what is known of it besides."""
        shared, decision = self._shared, self._decide(work)
        assert self._update is not None
        if self._has_buffers:
            self._buffers.commit(shared.results[:, 1])
        if self._precision is not None:
            self._precision.commit(work.step, decision.half)
        if self._asked != work.step and decision.sums.weight and decision.is_taken:
            self._update.run(work.step, decision.scale, decision.touched)
        if self._asked != work.step:
            shared.finish_writes()
        if work.step < len(shared.losses):
            shared.losses[work.step] = decision.sums.mean_loss


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def _cuda_driver(device: str) -> DeviceDriver:
    from shoal.arena.cuda_driver import CudaDriver

    return CudaDriver(device)
