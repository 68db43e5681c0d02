"""Data parallel by summing gradients over sockets: every worker keeps the whole model and takes the same step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shoal.arena import make_grid
from shoal.arena.tensors import dense_stride, flat_of
from shoal.errors import SpecError
from shoal.model.buffers import BufferMean, MovingBuffers
from shoal.model.optimizer.state import load_named_state, named_state
from shoal.model.replica import Replica
from shoal.spec import Data
from shoal.step.compute import Sums, backward_part, check_weight
from shoal.step.direct import leave, write_directly
from shoal.step.passes import SlotPasses
from shoal.step.tap import GradientTap
from shoal.step.update import Update
from shoal.step.work import Work
from shoal.strategies.base import Fill, Setting, StepResult, WholeModel, step_result
from shoal.strategies.data.batchnorm import check_pieces, check_took_part, synchronise
from shoal.strategies.data.summing import Summing, make_summing
from shoal.strategies.groups.summed import SummedSwap


class CollectiveData(WholeModel):
    """One flat gradient per dtype, summed by the algorithm that `via` names."""

    def __init__(self, spec: Data, given: Summing | None = None, *, may_lack_samples: bool = False) -> None:
        """`given`: how workers sum that have come together already; whoever gave it closes it. `may_lack_samples`:
        there are others, and these workers' part of a small batch may be nothing."""
        self._spec = spec
        self._given = given
        self._may_lack_samples = may_lack_samples

    def open(self, replica: Replica, setting: Setting) -> None:
        self._replica = replica
        self._setting = setting
        if isinstance(replica.optimizer, torch.optim.LBFGS) and setting.world.world_size > 1:
            raise SpecError(
                f"LBFGS evaluates the loss several times per step, which via={self._spec.via} cannot do; "
                "use via=arena."
            )
        if self._spec.batchnorm == "sync":
            check_pieces(setting)
        self._summing = self._given or make_summing(self._spec.via, setting)
        self._params = list(replica.trained.values())
        self._update = Update(replica, setting.clip_norm)
        self._flats, self._views = _flat_gradients(self._params)
        self._touched = torch.zeros(len(self._params), dtype=torch.uint8).numpy()
        self._tap = GradientTap(self._params)
        self._direct = (
            [] if replica.is_by_sample else write_directly(replica.module, self._params, self._tap, replica.form)
        )
        self._buffers = MovingBuffers(replica.module)
        load_named_state(replica)
        replica.precision.bind(replica.module, report=setting.company.report if setting.world.is_first else None)
        swap = SummedSwap(setting.slots, self._summing.all_reduce_)
        self._passes = SlotPasses(swap, (self._tap.keep, self._buffers.keep), device=replica.device)
        if self._spec.batchnorm == "sync":
            synchronise(replica.module, self._passes.asking)
        for tensor in (*replica.trained.values(), *replica.untrained.values()):
            if tensor.is_floating_point():
                values = tensor.data.contiguous().view(-1)
                self._summing.broadcast_(values)
                tensor.data.copy_(values.view(tensor.shape))

    def take(self, work: Work) -> StepResult:
        moved, own, used = self._gradients(work)
        if self._setting.company.on_block is not None:
            self._setting.company.on_block()
        weights = torch.zeros(self._setting.world.world_size, dtype=torch.float64)
        weights[self._setting.world.global_rank] = own.weight
        flags = [float(work.stop), float(work.save), float(moved.counted)]
        told = [own.loss, own.skipped, own.skipped_parts]
        head = torch.tensor([*told, *flags, *own.all_parts], dtype=torch.float64)
        counts = torch.zeros(self._setting.slots, dtype=torch.float64)
        for slot, samples in used.items():
            counts[slot] = samples
        control = torch.cat([head, weights, counts, torch.from_numpy(self._touched).double()])
        self._summing.all_reduce_(control)
        loss, skipped, skipped_parts, stop, save, counted, *parts = control[: len(head)].tolist()
        weights, counts, touched = control[len(head) :].split([len(weights), len(counts), len(self._touched)])
        sums = Sums(loss, float(weights.sum()), skipped, skipped_parts, parts=tuple(parts))
        if self._may_lack_samples and not sums.weight + sums.skipped:
            moved.start()
            return StepResult(
                loss=math.nan, weight=0.0, stop=bool(stop), save=bool(save), counts=(0,) * self._setting.slots
            )
        check_weight(work, sums)
        if sums.weight:
            is_taken = self._sum_up(work, sums.weight)
            speaks = int(weights.nonzero()[0]) == self._setting.world.global_rank
            moved.finish(self._summing.all_reduce_, sums.weight, counted=bool(counted), speaks=speaks)
            if is_taken:
                self._step(touched > 0)
        else:  # all of the batch was learnt already
            moved.start()
        used_by_slot, names = [int(count) for count in counts.tolist()], self._replica.loss_parts.names
        return step_result(sums, stop=bool(stop), save=bool(save), counts=used_by_slot, names=names)

    def _sum_up(self, work: Work, weight: float) -> bool:
        """Make every worker's gradients the mean of all; whether they are fit for a step."""
        self._add_up(self._flats)
        # The sums are the same bits everywhere, and so is what follows from them.
        named = zip(self._replica.trained, self._views, strict=True)
        return self._update.scale_and_check(work, weight, self._flats, named)

    def _add_up(self, flats: list[torch.Tensor]) -> None:
        """Over all workers, in place."""
        for flat in flats:
            self._summing.all_reduce_(flat)

    def _gradients(self, work: Work) -> tuple[BufferMean, Sums, dict[int, float]]:
        """This worker's slots: gradients in the views; returns moved buffers, sums, and samples by slot."""
        parts = {part.slot: part for part in work.parts}
        moved = self._buffers.begin_mean()

        def compute(slot: int) -> Sums:
            if slot == work.parts[0].slot:  # the others' gradients are added to these
                self._tap.aim(self._views, self._touched)
            moved.start()
            own = backward_part(self._replica, work, parts[slot], self._tap.backward)
            if self._spec.batchnorm == "sync":
                check_took_part(own.weight, work.step)
            moved.add(own.weight)
            return own

        by_slot = dict(zip(parts, self._passes.run(work.step, list(parts), compute), strict=True))
        sums = sum(by_slot.values(), start=Sums())
        used = {slot: own.samples for slot, own in by_slot.items()}
        for number, view in enumerate(self._views):
            if not self._touched[number]:
                view.zero_()  # a slot elsewhere may have a gradient for it
        return moved, sums, used

    def _step(self, touched: torch.Tensor) -> None:
        for param, view, used in zip(self._params, self._views, touched.tolist(), strict=True):
            param.grad = view if used else None
        self._update.clip(self._params)
        self._replica.optimizer.step()
        for param in self._params:
            param.grad = None

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        table = torch.zeros(shape, dtype=torch.float64)
        fill(table, self._setting.world.global_rank)
        self._summing.all_reduce_(table.view(-1))
        return table

    def snapshot(self) -> dict[str, torch.Tensor]:
        return named_state(self._replica)

    def close(self) -> None:
        self._tap.close()
        leave(self._direct)
        if self._given is None:
            self._summing.close()


def _flat_gradients(params: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One zeroed flat tensor per dtype, and views of them shaped as the parameters."""
    grid = make_grid([flat_of(p) for p in params])
    block = torch.zeros(grid.nbytes, dtype=torch.uint8, device=params[0].device)
    flats, views = [], []
    for dtype in dict.fromkeys(p.dtype for p in params):
        own = [(offset, p) for offset, p in zip(grid.offsets, params, strict=True) if p.dtype == dtype]
        end = own[-1][0] + own[-1][1].numel() * dtype.itemsize
        flats.append(block[own[0][0] : end].view(dtype))
    for offset, p in zip(grid.offsets, params, strict=True):
        flat = block[offset : offset + p.numel() * p.element_size()].view(p.dtype)
        views.append(flat.as_strided(p.shape, dense_stride(p), flat.storage_offset()))
    return flats, views
