"""The loss scale where a GPU reads and changes it, so that a captured step follows the rules of plain ones unseen.

The rules are those of `HalfState.after`; here they are written for a device that cannot be asked. The host hears
of a step when it has come to its losses, and is behind by the steps that are open until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import optim
from torch.utils._pytree import tree_leaves

from shoal.feed.parts import Part
from shoal.model.half_range import STEPS_TO_DOUBLE, HalfState
from shoal.model.precision import Precision
from shoal.step.compute import DeferredSums, Sums
from shoal.step.work import Work

_LOOKS_ITSELF = (optim.Adam, optim.AdamW, optim.SGD)
"""Optimizers whose fused kernels leave all as it is where a number on the device says so."""


class DeviceScale:
    """What `Precision` knows of half precision, on the device. A tensor `spoilt` is 1 where a gradient of a step
    is no number, and 0 where all are."""

    def __init__(self, precision: Precision, device: str) -> None:
        self._precision = precision
        self._sent: HalfState | None = None
        """What the host knew when it last sent or heard: another one has come by a plain step, or was loaded."""
        self._open: list[ScaledSums] = []
        # As Python's numbers: in float32 a scale that nothing halves would end as infinite, and stay there.
        self.values = torch.zeros(len(precision.state.values), dtype=torch.float64, device=device)

    def send(self) -> None:
        """Let the next step begin with what the host knows, where it has not heard that from the device."""
        if self._precision.state is not self._sent:
            assert not self._open, "the host knows what the device has come to before it changes it"
            self._sent = self._precision.state
            self.values.copy_(torch.tensor(self._sent.values, dtype=torch.float64))

    def opens(self, found: ScaledSums) -> None:
        """A step is asked of the device, after all others."""
        self._open.append(found)

    def hears(self, found: ScaledSums, step: int, values: Sequence[float]) -> None:
        """What a step has come to, which was open."""
        self._open.remove(found)
        self._precision.follow(step, HalfState.of(values))
        self._sent = self._precision.state

    def settle(self) -> None:
        """Wait for all that is open: the host is to take a step itself."""
        for found in list(self._open):
            found.resolve()

    def scaled(self, share: torch.Tensor) -> torch.Tensor:
        """What a loss is to be weighted by before the backward pass."""
        return share * self.values[0]

    def unscale(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """Divide gradients by the scale; `spoilt` of this step."""
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in gradients:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        spoilt = torch.zeros((), device=self.values.device)
        inverse = self.values[0].reciprocal().float()
        for alike in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(alike, spoilt, inverse)
        return spoilt

    def advance(self, spoilt: torch.Tensor) -> None:
        """What follows a step. Products and sums alone: to choose between numbers of the host is to send them."""
        scale, good_steps, skipped = self.values.unbind()
        bad = spoilt.double()
        doubles = (good_steps + 1 == STEPS_TO_DOUBLE).double() * (1 - bad)
        following = [
            scale * (1 + doubles - bad / 2),
            (good_steps + 1) * (1 - bad) * (1 - doubles),
            skipped + bad,
        ]
        self.values.copy_(torch.stack(following))


class ScaledSums(DeferredSums):
    """What a captured step comes to, told together with what the loss scale is after it."""

    def __init__(self, work: Work, part: Part, scale: DeviceScale) -> None:
        super().__init__(work, part)
        self._scale = scale
        self._values: torch.Tensor | None = None

    def is_sent(self, rows: torch.Tensor, event: torch.cuda.Event | None, weights: Sequence[float]) -> None:
        """`rows`: one behind the other, and then the values of the scale."""
        number = self._scale.values.numel()
        super().is_sent(rows[:-number].view(len(weights), -1), event, weights)
        self._values = rows[-number:]
        self._scale.opens(self)

    def resolve(self) -> Sums:
        sums = super().resolve()
        if self._values is not None:
            values, self._values = self._values.tolist(), None
            self._scale.hears(self, self._work.step, values)
        return sums


def looks_itself(optimizer: optim.Optimizer) -> bool:
    """Whether an optimizer leaves all as it is where a number on the device says so; of any other all that it
    changes must be kept beside it."""
    return type(optimizer) in _LOOKS_ITSELF and all(group.get("fused") for group in optimizer.param_groups)


def step_unless(spoilt: torch.Tensor, optimizer: optim.Optimizer) -> None:
    """Let an optimizer take its step; where gradients are `spoilt`, parameters and what it keeps stay as they
    are."""
    if looks_itself(optimizer):
        optimizer.grad_scale, optimizer.found_inf = None, spoilt  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        return
    changed = _changed_by(optimizer)
    before = [tensor.detach().clone() for tensor in changed]
    optimizer.step()
    with torch.no_grad():
        is_spoilt = spoilt > 0
        for tensor, old in zip(changed, before, strict=True):
            torch.where(is_spoilt, old, tensor, out=tensor)


def _changed_by(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    """All that a step changes."""
    params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    kept = tree_leaves([list(optimizer.state[param].values()) for param in params if param in optimizer.state])
    return [*params, *(leaf for leaf in kept if isinstance(leaf, torch.Tensor))]
