"""Forward and backward for one slot, behind one contract: the same bits whoever runs them.

`EagerCompute` runs the task's own code as it is; `CompiledCompute` (`step/compiled.py`) compiles it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from shoal.errors import Diverged, TaskError
from shoal.feed.parts import Part
from shoal.ledger.order import mix
from shoal.model.memory_format import images_last
from shoal.model.replica import Replica, call_model
from shoal.spec import Task
from shoal.spec.task import MOST_LOSS_PARTS
from shoal.step.half_weights import HalfWeights
from shoal.step.work import Work


def seed_slot(work: Work, slot: int, device: str) -> None:
    """Key this process's random numbers to the slot, not to the process."""
    key = mix(work.seed, work.step, slot) >> 1  # 63 bits: torch takes a signed number
    torch.default_generator.manual_seed(key)
    if device != "cpu":
        torch.cuda.manual_seed(key)


class ToldLoss(NamedTuple):
    """A batch's loss, and the numbers that it is told with."""

    loss: torch.Tensor
    parts: tuple[Any, ...] = ()
    """Tensors without a history, or plain numbers; in the order of the replica's `loss_parts`."""

    def weighted(self, weight: float) -> Sums:
        """What a batch of this weight comes to. A device is waited for."""
        return Sums(self.loss.item() * weight, weight, parts=tuple(float(part) * weight for part in self.parts))


def task_loss(replica: Replica, batch: Any, step: int = 0) -> ToldLoss:
    """The task's loss on a batch, checked to be one number; 0 where it belongs to no step."""
    with replica.precision.autocast(step):
        return told_loss(replica, raw_loss(replica.task, replica.module, batch))


def raw_loss(task: Task, module: nn.Module, batch: Any) -> Any:
    """What the task makes of a batch, whatever that is."""
    if task.objective is not None:
        return task.objective(module, batch)
    inputs, target = split_batch(batch)
    assert task.loss is not None
    return task.loss(call_model(module, inputs), target)


def told_loss(replica: Replica, found: Any) -> ToldLoss:
    """What a task's loss or objective returned, checked."""
    known = replica.loss_parts
    parts = known.of(found) if known.names or not isinstance(found, torch.Tensor) else ()
    return ToldLoss(replica.precision.widened(check_loss(found)), parts)


def plain_loss(replica: Replica, batch: Any) -> torch.Tensor:
    """The loss alone in the model's own numbers, whatever precision the job asks for."""
    return check_loss(raw_loss(replica.task, replica.module, batch))


def check_loss(found: Any) -> torch.Tensor:
    """A loss must be one number; in a dict, what is called `loss`."""
    loss = found.get("loss") if isinstance(found, Mapping) else found
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TaskError(
            f"Task: the loss must be one number (a tensor with a single element), found {found}; "
            "take its mean over the batch, for instance with reduction='mean'."
        )
    return loss


def check_finite(value: float, work: Work, part: Part) -> None:
    """A loss that is no number spoils all that follows."""
    if not math.isfinite(value):
        raise Diverged(
            f"Task: the loss is {value} at step {work.step} (slot {part.slot}); lower the learning rate, "
            "set clip_norm, or look for bad samples in this batch."
        )


def split_batch(batch: Any) -> tuple[Any, Any]:
    """A batch's inputs and target."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        found = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise TaskError(
            f"Task: a batch must be (inputs, target), found {found}; put several inputs into a tuple or dict, "
            "set collate, or use objective= in place of loss=."
        )
    return batch[0], batch[1]


Backward = Callable[[torch.Tensor, torch.Tensor | None], None]
"""Runs the backward pass from a loss, weighted by the second argument."""
SAMPLES = 4
"""Where `Sums.values` has how many samples there are."""


@dataclass(frozen=True)
class Sums:
    """What the batches of one or more slots come to."""

    loss: float = 0.0
    """The sum of weight times loss, also of batches that were skipped."""
    weight: float = 0.0
    """What the batches count together that gave gradients."""
    skipped: float = 0.0
    """What those would have counted that were learnt already, and gave none."""
    skipped_parts: float = 0.0
    """How many these were."""
    samples: float = 0.0
    """How many samples all of them hold."""
    parts: tuple[float, ...] = ()
    """Of each number that the loss is told with, as of the loss; none where no loss was computed."""

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.loss + other.loss,
            self.weight + other.weight,
            self.skipped + other.skipped,
            self.skipped_parts + other.skipped_parts,
            self.samples + other.samples,
            add_parts(self.parts, other.parts),
        )

    @property
    def values(self) -> tuple[float, ...]:
        """As numbers that can be stored or sent, always as many."""
        return self.loss, self.weight, self.skipped, self.skipped_parts, self.samples, *self.all_parts

    @property
    def all_parts(self) -> tuple[float, ...]:
        """The parts, and zeros for those that there might be."""
        return (*self.parts, *(0.0,) * (MOST_LOSS_PARTS - len(self.parts)))

    @classmethod
    def of(cls, values: Sequence[float]) -> Sums:
        """What `values` told."""
        loss, weight, skipped, skipped_parts, samples, *parts = values
        return cls(loss, weight, skipped, skipped_parts, samples, tuple(parts))

    @property
    def mean_loss(self) -> float:
        """The loss over all batches."""
        return self.loss / (self.weight + self.skipped)


def add_parts(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    """Numbers beside two losses, added up; either may have none."""
    if not left or not right:
        return left or right
    return tuple(mine + theirs for mine, theirs in zip(left, right, strict=True))


class DeferredSums:
    """What a slot's batches come to. A device may still be at it: only `resolve` waits."""

    def __init__(self, work: Work, part: Part) -> None:
        self._work = work
        self._part = part
        self._rows: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        """Losses, each with what it is told with, and when they are there."""
        self._weights: list[float] = []
        """Of these."""
        self._known = Sums()

    def add(self, known: Sums) -> None:
        """This much is known."""
        self._known += known

    def defer(self, loss: torch.Tensor, weight: float, parts: Sequence[Any] = ()) -> None:
        """A batch of this weight has a loss that nobody has looked at. A GPU sends it as soon as it is there:
        whoever waits for it waits for no backward pass, and can ask for the next step meanwhile."""
        told = (torch.as_tensor(part, dtype=loss.dtype, device=loss.device) for part in parts)
        row = torch.stack([each.detach().reshape(()) for each in (loss, *told)])
        if not row.is_cuda:
            self._rows.append((row, None))
            self._weights.append(weight)
            return
        room, event = torch.empty(row.shape, dtype=row.dtype, pin_memory=True), torch.cuda.Event()
        room.copy_(row, non_blocking=True)
        event.record()
        self.is_sent(room, event, [weight])

    def is_sent(self, rows: torch.Tensor, event: torch.cuda.Event | None, weights: Sequence[float]) -> None:
        """Losses of these weights are in `rows` when the GPU has come to `event`."""
        self._rows.append((rows, event))
        self._weights += weights

    @property
    def weight(self) -> float:
        """What the batches count that give gradients: known before any loss is."""
        return self._known.weight + sum(self._weights)

    def resolve(self) -> Sums:
        """Wait for the device, and know all of it; `Diverged` where a loss is no number."""
        if self._rows:
            found: list[list[float]] = []
            for rows, event in self._rows:
                if event is not None:
                    event.synchronize()
                found += rows.reshape(-1, rows.shape[-1]).tolist()
            weights, self._rows, self._weights = self._weights, [], []
            for (value, *parts), weight in zip(found, weights, strict=True):
                check_finite(value, self._work, self._part)
                self._known += Sums(value * weight, weight, parts=tuple([part * weight for part in parts]))
        return self._known


class Compute(Protocol):
    """Runs a slot's passes."""

    def run(self, work: Work, part: Part, backward: Backward = torch.Tensor.backward) -> DeferredSums:
        """Backward over the slot's batches; gradients go to `p.grad`, or where `backward` leads them.

        Each loss is weighted by its share of the whole batch where that is known beforehand, else by its bare
        weight; whoever sums the slots then divides by the total, and by the scale of the replica's precision.
        """


class EagerCompute:
    """Batch by batch, as Python says."""

    halves: HalfWeights | None = None
    """What casts the weights of all layers at once, where gradients go to `p.grad` and nowhere else."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._has_images_last = replica.form.memory_format == "channels_last"
        if replica.form.loss_in_pieces:
            from shoal.step.pieces import split_loss

            split_loss(replica)

    def run(self, work: Work, part: Part, backward: Backward = torch.Tensor.backward) -> DeferredSums:
        replica, found = self._replica, DeferredSums(work, part)
        seed_slot(work, part.slot, replica.device)
        learnt = replica.task.skip_loss_below
        # A device is not waited for, unless what comes next depends on the loss.
        looks_at_once = learnt is not None or replica.device == "cpu"
        for batch, weight, samples in part.load():
            found.add(Sums(samples=samples))
            if not weight:  # padding alone: it counts nothing, and its mean is not a number
                continue
            if self.halves is not None:
                self.halves.begin()
            told = self.loss(batch, work.step)
            loss = told.loss
            if looks_at_once:
                check_finite(value := loss.item(), work, part)
                counted = told.weighted(weight)
                if learnt is not None and value < learnt:
                    found.add(replace(counted, weight=0.0, skipped=weight, skipped_parts=1.0))
                    continue
                found.add(counted)
            else:
                found.defer(loss, weight, told.parts)
            share = weight if part.total_weight is None else weight / part.total_weight
            share *= replica.precision.scale
            self.backward(backward, loss, None if share == 1.0 else torch.full_like(loss, share))
            if self.halves is not None:
                self.halves.end()
        return found

    def loss(self, batch: Any, step: int) -> ToldLoss:
        """That of a batch in the form that the job asks for."""
        return task_loss(self._replica, self._laid_out(batch), step)

    def _laid_out(self, batch: Any) -> Any:
        return images_last(batch) if self._has_images_last else batch

    def backward(self, backward: Backward, loss: torch.Tensor, share: torch.Tensor | None) -> None:
        """The backward pass of what `loss` gave, weighted by `share`."""
        backward(loss, share)


def compute_of(replica: Replica) -> Compute:
    """Who runs a replica's passes, in the form that its job asks for."""
    if replica.compute is None:
        if replica.form.compile:
            from shoal.step.compiled import CompiledCompute

            replica.compute = CompiledCompute(replica)
        else:
            replica.compute = EagerCompute(replica)
    found: Compute = replica.compute
    return found


def backward_part(replica: Replica, work: Work, part: Part, backward: Backward = torch.Tensor.backward) -> Sums:
    """A slot's passes, and what they come to, now."""
    return compute_of(replica).run(work, part, backward).resolve()


def check_weight(work: Work, sums: Sums) -> None:
    """A mean needs something to be the mean of."""
    if not sums.weight + sums.skipped > 0:
        raise TaskError(
            f"Task: the weights of the batch of step {work.step} add up to {sums.weight:g}, so it has no mean; "
            "let weight(batch) return what counts, and leave samples without any out of the data."
        )
