"""Whether a task's loss is a mean over samples, as cutting a batch into parts takes for granted.

A mean over tokens, class weights or negatives from within the batch are not: unless `weight=` says what a batch
counts, two workers train something else than one, and nothing fails. So the first batch of a run is looked at
twice, whole and in halves, and where they differ it is tried out why.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.feed.parts import LoadedBatch, Part
from shoal.model.gathering import asking_nobody
from shoal.model.replica import Replica
from shoal.roles.training.mean_cause import LossLook
from shoal.spec import Task
from shoal.step.compute import plain_loss

_ROUNDING = 100.0
"""So many of the last digit two losses may differ that are equal but for rounding."""
_NOISE = 16.0
"""So many times what the order of the samples changes; that is much where large numbers make a small loss."""
_ROTATIONS = 4


class MeanCheck:
    """Looks once at a batch, the first that this process trains on; `report` is told where its loss is no mean."""

    def __init__(self, replica: Replica, parts: int, report: Callable[[str], None]) -> None:
        self._replica = replica
        self._parts = parts
        self._report = report
        self.is_done = False
        """Whether it has looked."""

    def watch(self, part: Part) -> Part:
        """The same part; before its first batch is trained on, it is looked at."""

        def load() -> Iterator[LoadedBatch]:
            for batch, weight, samples in part.load():
                if not self.is_done:
                    self.is_done = True
                    self.look(batch, samples)
                yield batch, weight, samples

        return replace(part, load=load)

    def look(self, batch: Any, samples: int) -> None:
        """Compare the batch with its halves now."""
        if (found := seen_in(self._replica, batch, samples)) is not None:
            seen, cause = found
            self._report(
                f"{seen}, so {self._parts} parts of a batch train otherwise than one; {cause}; see what is left "
                "with shoal verify"
            )


def seen_in(replica: Replica, batch: Any, samples: int) -> tuple[str, str] | None:
    """That the loss of a batch is no mean over its samples, and why, with what to set; None where it is one, or
    nothing can be said."""
    try:
        found = compare(replica, batch, samples)
    except Exception:
        return None  # A batch that cannot be halved, a model that only trains.
    if found is None or not found.differs:
        return None
    try:
        return found.text, explain(replica, batch, found)
    except Exception:
        return found.text, "say with weight= what a batch counts (its tokens, say)"  # What was tried fails here.


@dataclass(frozen=True)
class MeanComparison:
    """A batch's loss, and what it would be by its halves."""

    whole: float
    of_halves: float
    tolerance: float
    """What rounding may come to."""
    samples: int

    @property
    def text(self) -> str:
        """What was seen, as half a sentence."""
        return (
            f"the loss is no mean over samples: it is {self.whole:.6g} on {self.samples} samples and "
            f"{self.of_halves:.6g} by the means of their halves"
        )

    @property
    def differs(self) -> bool:
        """Whether cutting the batch changes what is trained."""
        return abs(self.whole - self.of_halves) > self.tolerance


def compare(replica: Replica, batch: Any, samples: int) -> MeanComparison | None:
    """Both losses, without a trace; None where nothing can be said."""
    if samples < 2 or any(map(_mixes_samples, replica.module.modules())):
        return None
    half = samples // 2
    halves = [rows_of(batch, samples, rows) for rows in (range(half), range(half, samples))]
    sizes = half, samples - half
    weights = [_weight(replica.task, part, size) for part, size in zip(halves, sizes, strict=True)]
    with undisturbed(replica) as generators, asking_nobody() as nobody:
        whole = float(plain_loss(replica, batch))
        if generators.have_moved() or nobody.was_asked:
            return None  # It draws random numbers, which halves would draw otherwise; or gathers what parts have.
        # What counts nothing (padding alone) has no mean either.
        losses = [
            float(plain_loss(replica, part)) if weight else 0.0
            for part, weight in zip(halves, weights, strict=True)
        ]
        of_halves = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
        if not (math.isfinite(whole) and math.isfinite(of_halves)):
            return None
        rounding = _ROUNDING * _last_digit(replica) * max(abs(whole), *map(abs, losses))
        found = MeanComparison(whole, of_halves, rounding, samples)
        if not found.differs:
            return found
        return replace(found, tolerance=max(rounding, _NOISE * _noise(replica, batch, samples, whole)))


def explain(replica: Replica, batch: Any, found: MeanComparison) -> str:
    """Why the loss of this batch is not that of its halves, and what to set, as half a sentence."""
    samples, half = found.samples, found.samples // 2
    first, second, twice = (
        rows_of(batch, samples, rows)
        for rows in (range(half), range(half, samples), [*range(samples), *range(samples)])
    )
    with undisturbed(replica):
        loss_first, loss_second, loss_twice = (float(plain_loss(replica, part)) for part in (first, second, twice))
    return LossLook(
        batch=batch,
        halves=(first, second),
        whole=found.whole,
        losses=(loss_first, loss_second),
        twice=loss_twice,
        tolerance=found.tolerance,
        is_weighted=replica.task.weight is not None,
    ).cause()


def _noise(replica: Replica, batch: Any, samples: int, whole: float) -> float:
    """How far the order of the samples, which no loss depends on, changes it."""
    starts = {samples * rotation // (_ROTATIONS + 1) for rotation in range(1, _ROTATIONS + 1)} - {0}
    orders = [[*range(start, samples), *range(start)] for start in starts] + [[*range(samples)][::-1]]
    return max(abs(whole - float(plain_loss(replica, rows_of(batch, samples, order)))) for order in orders)


def rows_of(batch: Any, samples: int, rows: Sequence[int]) -> Any:
    """Some samples of a batch; `ValueError` where it does not show which rows are whose."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        if batch.ndim and len(batch) == samples:
            return batch[list(rows)]
    elif isinstance(batch, dict):
        return {key: rows_of(value, samples, rows) for key, value in batch.items()}
    elif isinstance(batch, tuple | list):
        try:
            found = [rows_of(value, samples, rows) for value in batch]
        except ValueError:
            if len(batch) != samples or hasattr(batch, "_fields"):
                raise
            return type(batch)(batch[row] for row in rows)
        return type(batch)(*found) if hasattr(batch, "_fields") else type(batch)(found)
    elif batch is None or isinstance(batch, str | bool):
        return batch
    raise ValueError("this is not one row for each sample")


class Generators:
    """The random generators that a task may draw from, as they were."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._before = self._states()

    def have_moved(self) -> bool:
        """Whether anybody has drawn from one of them."""
        return self._plain(self._states()) != self._plain(self._before)

    def restore(self) -> None:
        """Nobody has."""
        torchs, numpys, pythons, gpus = self._before
        torch.default_generator.set_state(torchs)
        np.random.set_state(numpys)
        random.setstate(pythons)
        if gpus is not None:
            torch.cuda.set_rng_state(gpus, self._device)

    def _states(self) -> tuple[Any, ...]:
        gpus = None if self._device == "cpu" else torch.cuda.get_rng_state(self._device)
        return torch.default_generator.get_state(), np.random.get_state(), random.getstate(), gpus

    @staticmethod
    def _plain(states: tuple[Any, ...]) -> tuple[Any, ...]:
        torchs, numpys, pythons, gpus = states
        drawn = [part.tobytes() if isinstance(part, np.ndarray) else part for part in numpys]
        return torchs.numpy().tobytes(), drawn, pythons, None if gpus is None else gpus.numpy().tobytes()


@contextmanager
def undisturbed(replica: Replica) -> Iterator[Generators]:
    """Compute without a trace: no gradients, dropout off, BatchNorm by its averages; then all is as it was."""
    modules = list(replica.module.modules())
    modes = [module.training for module in modules]
    buffers = [(m, name, b, b.clone()) for m in modules for name, b in m._buffers.items() if b is not None]
    generators = Generators(replica.device)
    try:
        for module in modules:  # not by eval(), which a model may have made do more
            module.training = False
        with torch.no_grad(), nullcontext() if replica.device == "cpu" else _all_digits():
            yield generators
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for module, name, buffer, kept in buffers:
            module._buffers[name] = buffer
            buffer.copy_(kept)
        generators.restore()


@contextmanager
def _all_digits() -> Iterator[None]:
    """GPUs may multiply float32 with fewer digits than it has."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def _weight(task: Task, batch: Any, samples: int) -> float:
    return float(samples) if task.weight is None else float(task.weight(batch))


def _mixes_samples(module: nn.Module) -> bool:
    """Whether it computes with a batch's own statistics even where it does not train."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None


def _last_digit(replica: Replica) -> float:
    """Of the coarsest numbers that the model computes in."""
    kinds = {p.dtype for p in replica.module.parameters() if p.is_floating_point()} | {torch.float32}
    return max(torch.finfo(kind).eps for kind in kinds)
