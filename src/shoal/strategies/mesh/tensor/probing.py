"""A last look at the model as a whole, with the real workers: does it still give the same loss and gradients?"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shoal.comm.group import Group
from shoal.model.replica import Replica
from shoal.step.compute import plain_loss
from shoal.strategies.mesh.splits import Split
from shoal.strategies.mesh.tensor.recording import sample_of, undisturbed

LOSS_TOLERANCE = 1e-3
OWN_TOLERANCE, COMMON_TOLERANCE = 1e-2, 1e-4
"""Of a gradient, relative to its own length and to the longest: rounding may turn a ReLU near zero over."""


@dataclass(frozen=True, kw_only=True)
class CutProbe:
    """The loss of a few samples, and by parameter how far its gradient goes in a direction drawn by its name. A
    gradient is dropped as soon as it has been measured, so that there is never more than one. All in the model's
    own numbers: half precision rounds more than a wrong cut of a small layer may change."""

    loss: float
    marks: Mapping[str, tuple[float, float]]
    """Along the direction, and squared length."""
    shapes: Mapping[str, torch.Size]
    """Of whole parameters."""

    @classmethod
    def of(cls, replica: Replica) -> CutProbe | None:
        """Of a whole model; None where there is nothing to be measured."""
        if replica.sample is None:
            return None
        shapes = {name: p.shape for name, p in replica.module.named_parameters()}
        loss, marks = _measure(replica, shapes, {}, None)
        if not math.isfinite(loss) or not marks:
            return None
        return cls(loss=loss, marks=marks, shapes=shapes)

    def agrees(self, replica: Replica, splits: Mapping[str, Split], workers: Group) -> bool:
        """Whether the same model, cut over workers who all ask this, still gives this; all get the same answer."""
        try:
            loss, marks = _measure(replica, self.shapes, splits, workers)
            is_same = self._is_near(loss, _joined(marks, splits, workers))
        except Exception:  # whatever the model's code says to parts of its layers, it says to all workers alike
            is_same = False
        objections = torch.tensor([float(not is_same)], device=replica.device)
        return not float(workers.all_reduce_(objections))

    def _is_near(self, loss: float, marks: Mapping[str, tuple[float, float]]) -> bool:
        if (
            marks.keys() != self.marks.keys()
            or not abs(loss - self.loss) <= LOSS_TOLERANCE * abs(self.loss) + 1e-6
        ):
            return False
        longest = max(math.sqrt(squares) for _, squares in self.marks.values())
        return all(
            abs(along - marks[name][0]) <= OWN_TOLERANCE * math.sqrt(squares) + COMMON_TOLERANCE * longest
            for name, (along, squares) in self.marks.items()
        )


def _measure(
    replica: Replica, shapes: Mapping[str, torch.Size], splits: Mapping[str, Split], workers: Group | None
) -> tuple[float, dict[str, tuple[float, float]]]:
    marks: dict[str, tuple[float, float]] = {}
    handles = []
    for name, param in replica.module.named_parameters():
        if not param.requires_grad:
            continue

        def mark(param: torch.Tensor, name: str = name) -> None:
            assert param.grad is not None
            grad = param.grad.detach().to_dense().double()
            direction = _direction(name, shapes[name], splits.get(name), workers).to(grad.device)
            marks[name] = (float((grad * direction).sum()), float(grad.square().sum()))
            param.grad = None

        handles.append(param.register_post_accumulate_grad_hook(mark))
    try:
        with undisturbed(replica.module):
            loss = plain_loss(replica, sample_of(replica))
            if loss.requires_grad:
                loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    return float(loss.detach()), marks


def _direction(name: str, shape: torch.Size, split: Split | None, workers: Group | None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = torch.randn(shape, generator=generator)
    if split is None or workers is None:
        return whole
    return split.cut(whole, workers.index, workers.size)


def _joined(
    marks: Mapping[str, tuple[float, float]], splits: Mapping[str, Split], workers: Group
) -> dict[str, tuple[float, float]]:
    """What is cut is measured by part, and added up; the rest each worker has measured whole."""
    names = [name for name in marks if name in splits]
    sums = torch.tensor([marks[name] for name in names], dtype=torch.float64).view(len(names), 2)
    workers.all_reduce_(sums)
    return {
        **marks,
        **{name: (float(along), float(squares)) for name, (along, squares) in zip(names, sums, strict=True)},
    }
