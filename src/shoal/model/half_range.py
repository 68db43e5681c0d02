"""What half precision can hold, and what follows: the loss scale, and layers that do not use it.

Pure functions of numbers that all processes agree on, so that all come to the same, and a successor does, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

FIRST_SCALE = 65536.0
STEPS_TO_DOUBLE = 2000
SMALLEST_SCALE = 2.0**-24
"""Where gradients are no numbers even so, the scale is not to blame."""
SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal
LARGEST = torch.finfo(torch.float16).max
MOST_OUTSIDE = 0.25
"""Of a layer's gradient, the share that may lie outside of half precision's range."""
PATIENCE = 3
"""A layer is moved to float32 when so many measurements in a row have found more."""
MEASURED_FIRST = 5
MEASURED_EVERY = 100


def is_measured(step: int) -> bool:
    """Whether the gradients of a step are compared with half precision's range."""
    return 0 < step <= MEASURED_FIRST or (step > 0 and step % MEASURED_EVERY == 0)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a step's gradients, multiplied by the scale, look like. Those of parts add up."""

    not_finite: float = 0.0
    """Tensors that hold something that is no number."""
    nonzero: tuple[float, ...] = ()
    """By layer: elements; all 0 where the step is not measured."""
    outside: tuple[float, ...] = ()
    """By layer: those of them that half precision could not hold."""

    @property
    def values(self) -> tuple[float, ...]:
        """As numbers that can be added up and sent."""
        return self.not_finite, *self.nonzero, *self.outside

    @classmethod
    def of(cls, values: Sequence[float]) -> Seen:
        """What `values` says."""
        layers = len(values) // 2
        nonzero, outside = values[1 : 1 + layers], values[1 + layers :]
        return cls(not_finite=values[0], nonzero=tuple(nonzero), outside=tuple(outside))


def measure(gradients: Iterable[tuple[int, torch.Tensor]], layers: int, *, in_full: bool) -> Seen:
    """Look at gradients, each with the number of its layer, or -1; `in_full`: at their range, too."""
    nonzero, outside = [0.0] * layers, [0.0] * layers
    looked_at = list(gradients)
    not_finite = _num_not_finite([gradient.detach() for _, gradient in looked_at])
    for layer, gradient in looked_at:
        if in_full and layer >= 0:
            size = gradient.detach().abs()
            within = (size >= SMALLEST_NORMAL) & (size <= LARGEST)
            count = int(torch.count_nonzero(size))
            nonzero[layer] += count
            outside[layer] += count - int(torch.count_nonzero(within))
    return Seen(not_finite=not_finite, nonzero=tuple(nonzero), outside=tuple(outside))


def _num_not_finite(gradients: Sequence[torch.Tensor]) -> float:
    """How many hold something that is no number. A GPU is asked once for all of them: to wait for each is most of
    a small step."""
    if not gradients or not all(gradient.is_cuda for gradient in gradients):
        return float(sum(not bool(torch.isfinite(gradient).all()) for gradient in gradients))
    largest = torch._foreach_norm([gradient for gradient in gradients if gradient.numel()], float("inf"))
    return float((~torch.isfinite(torch.stack(largest))).sum())


@dataclass(frozen=True, kw_only=True)
class HalfState:
    """What the steps so far have come to."""

    scale: float = FIRST_SCALE
    """What losses are multiplied by."""
    good_steps: int = 0
    """Since the scale has changed."""
    skipped: int = 0
    """Steps that changed nothing, because a gradient was no number."""
    streaks: tuple[int, ...] = ()
    """By layer: measurements in a row that found too much outside of the range."""

    @property
    def values(self) -> tuple[float, ...]:
        """As numbers that can be stored or sent."""
        return self.scale, float(self.good_steps), float(self.skipped), *map(float, self.streaks)

    @classmethod
    def of(cls, values: Sequence[float]) -> HalfState:
        """What `values` says."""
        scale, good_steps, skipped, *streaks = values
        return cls(scale=scale, good_steps=int(good_steps), skipped=int(skipped), streaks=tuple(map(int, streaks)))

    @property
    def too_small(self) -> list[int]:
        """Numbers of the layers that half precision is too small for."""
        return [layer for layer, streak in enumerate(self.streaks) if streak >= PATIENCE]

    def after(self, seen: Seen) -> HalfState:
        """What follows a step: the next one's scale, and the layers that leave half precision."""
        if seen.not_finite:
            return HalfState(scale=self.scale / 2, skipped=self.skipped + 1, streaks=self.streaks)
        doubles = self.good_steps + 1 == STEPS_TO_DOUBLE
        return HalfState(
            scale=self.scale * 2 if doubles else self.scale,
            good_steps=0 if doubles else self.good_steps + 1,
            skipped=self.skipped,
            streaks=tuple(map(_next_streak, self.streaks, seen.nonzero, seen.outside)),
        )


def _next_streak(streak: int, nonzero: float, outside: float) -> int:
    if streak >= PATIENCE or not nonzero:  # it has left for good, or was not measured
        return streak
    return streak + 1 if outside > MOST_OUTSIDE * nonzero else 0
