"""Sums of gradients over the workers that hold the same part of the model, each with its part of the batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.comm.group import BegunSum, Group
from shoal.errors import TaskError
from shoal.strategies.mesh.summing import sum_flat

_BUCKET_BYTES = 4 << 20
_LOOKS_UP_S = 0.002
"""How often what has arrived is looked for: some models have hundreds of parameters, and pass them in no time."""


class LateSums:
    """All are added up when the passes have ended."""

    def __init__(self, params: Mapping[str, torch.Tensor], group: Group) -> None:
        self._params, self._group = params, group

    def begin(self) -> None:
        """The passes of a step are to come."""

    def add_up(self, names: Collection[str]) -> None:
        """They have ended, and these have gradients, here or elsewhere: each gets the sum of all."""
        sum_flat([grad for name in names if (grad := self._params[name].grad) is not None], self._group)

    @property
    def facts(self) -> dict[str, Any]:
        """What a run's results say of it."""
        return {}

    def close(self) -> None:
        """No step is to come."""


@dataclass(eq=False, kw_only=True)
class _GradientBucket:
    """Neighbouring parameters of one type, whose gradients travel together."""

    number: int
    params: dict[str, torch.Tensor] = field(default_factory=dict)
    awaited: set[str] = field(default_factory=set)
    """Those that have no gradient yet in this step."""
    flat: torch.Tensor | None = None
    """What is on its way."""
    sum: BegunSum | None = None

    def begin(self) -> None:
        """Nothing has come in this step."""
        self.awaited, self.flat, self.sum = set(self.params), None, None

    def leave(self, group: Group) -> None:
        """Let all gradients go."""
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params.values()]
        self.flat = torch.cat([part.reshape(-1) for part in parts])
        self.sum = group.begin_sum(self.flat, self.number)

    def arrive(self) -> None:
        """Wait for the sums, for those who have a gradient."""
        assert self.sum is not None and self.flat is not None
        self.sum.wait()
        sums = self.flat.split([param.numel() for param in self.params.values()])
        for param, total in zip(self.params.values(), sums, strict=True):
            if param.grad is not None:
                param.grad.copy_(total.view(param.shape))


class EarlySums(LateSums):
    """Gradients leave as soon as a pass has made those of a bucket, while it goes on to the layers before.

    For parameters whose gradients lie in `p.grad` after one pass. Some come in parts, as those of checkpointed
    layers that are used twice: the first step, in which nothing leaves early, shows which these are.
    """

    def __init__(self, params: Mapping[str, torch.Tensor], group: Group) -> None:
        super().__init__(params, group)
        self._buckets = _cut(params)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.params}
        self._stay: set[str] = set()
        """Parameters whose gradients are not known to be whole before the pass has ended."""
        self._came: set[str] = set()
        self._has_shown = False
        """Whether a step has, which these are."""
        self._num_early = self._num_sent = 0
        """Buckets that have left early, and all that have left."""
        self._looked_up_at = 0.0
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._noting(name)) for name, param in params.items()
        ]

    def begin(self) -> None:
        self._came.clear()
        for bucket in self._buckets:
            bucket.begin()

    def _noting(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda param: self._on_gradient(name, param)

    def _on_gradient(self, name: str, param: torch.Tensor) -> None:
        bucket = self._bucket_of[name]
        assert param.grad is not None
        if name in self._came or param.grad.is_sparse:
            if bucket.sum is not None:
                raise TaskError(
                    f"Task: in this step, for the first time, the gradient of {name} came in parts, as do those "
                    "of checkpointed layers used twice; one had left for other hosts. Use strategy=data."
                )
            self._stay.add(name)
        self._came.add(name)
        bucket.awaited.discard(name)
        if self._has_shown and not bucket.awaited and self._stay.isdisjoint(bucket.params):
            bucket.leave(self._group)
            self._num_early += 1
        self._look_up()

    def _look_up(self) -> None:
        """Take in what has come, and send on what can be: others wait for it."""
        if (now := time.monotonic()) - self._looked_up_at < _LOOKS_UP_S:
            return
        self._looked_up_at = now
        self._group.pump()
        for bucket in self._buckets:
            if bucket.sum is not None:
                bucket.sum.advance()

    def add_up(self, names: Collection[str]) -> None:
        self._has_shown = True
        # What has left early is of all these names; so all processes take the same buckets.
        wanted = [bucket for bucket in self._buckets if not bucket.params.keys().isdisjoint(names)]
        for bucket in wanted:
            if bucket.sum is None:
                bucket.leave(self._group)
        for bucket in wanted:
            bucket.arrive()
        self._num_sent += len(wanted)

    @property
    def facts(self) -> dict[str, Any]:
        return {"early": round(self._num_early / max(1, self._num_sent), 3)}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _cut(params: Mapping[str, torch.Tensor]) -> list[_GradientBucket]:
    """Buckets in the order in which a backward pass comes to them: the last layers first."""
    buckets: list[_GradientBucket] = []
    left, dtype = 0, None
    for name, param in reversed(list(params.items())):
        if param.dtype != dtype or left <= 0:
            buckets.append(_GradientBucket(number=len(buckets)))
            left, dtype = _BUCKET_BYTES, param.dtype
        buckets[-1].params[name] = param
        left -= param.nbytes
    return buckets
