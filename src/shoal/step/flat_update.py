"""The weights of linear layers as one flat shard, updated from gradients as they come: in half precision.

Plain steps widen every gradient, clip all of them and update from that, each a way over all of the memory. Here
the gradients are gathered as they are; the update widens and clips them while it reads them. Parameters and what
the optimizer keeps for them are views of the shard's vectors, so that all others see what they always see; a
step in which not every one of these layers has a gradient of its own goes the plain way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.arena.tensors import apart
from shoal.errors import SpecError
from shoal.model.optimizer.kinds import begin_momentum
from shoal.model.replica import Replica
from shoal.step.flat_rules import FlatShard, kept_keys, why_not_flat

_ALIGN = 256
"""Elements between the beginnings of parameters: matrix products want them in memory at round addresses."""


@dataclass(frozen=True)
class _GroupShard:
    """The shard of those parameters that one of the optimizer's groups has."""

    shard: FlatShard
    group: Mapping[str, Any]
    params: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    """By parameter: where its gradient goes."""


class FlatUpdate:
    """The update of one process, whose `candidates` get gradients of type `dtype`."""

    def __init__(self, replica: Replica, candidates: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        if why := why_not_flat(replica.optimizer):
            raise SpecError(
                f"flat_update: the kernel knows AdamW, Adam and SGD without special settings, but {why}; leave "
                "flat_update out."
            )
        self._optimizer = replica.optimizer
        wanted = {id(param) for param in candidates if _owners(replica, param) == 1}
        groups = [
            (group, [param for param in group["params"] if id(param) in wanted])
            for group in replica.optimizer.param_groups
        ]
        self._shards = [_make_shard(self._optimizer, group, params, dtype) for group, params in groups if params]
        if not self._shards:
            raise SpecError(
                f"flat_update: no linear layer of {type(replica.module).__name__} has weights of its own to "
                "update in one kernel; leave flat_update out."
            )
        begin_momentum(replica.optimizer)
        self._params = {id(param) for one in self._shards for param in one.params}
        self._is_left = not all(bool((one.shard.steps == one.shard.steps[:1]).all()) for one in self._shards)
        """Whether parameters have seen other numbers of steps, which a kernel cannot tell apart."""
        self.is_filled = False
        """Whether the shard has the gradients of this step."""
        self.scale = 1.0
        """What gradients are to be multiplied by besides."""

    def take(self, gradients: Mapping[int, torch.Tensor]) -> bool:
        """Take the gradients of a pass, by the parameter's `id`, where they are all that the step has for these
        parameters; others stay where they are. Whether they were taken."""
        if self.is_filled:  # another batch of the same step: its gradients are added to these, in float32
            self._spill()
            return False
        if self._is_left:
            return False
        if any(id(p) not in gradients for one in self._shards for p in one.params):
            self._is_left = True
            return False
        if any(param.grad is not None for one in self._shards for param in one.params):
            return False
        for one in self._shards:
            torch._foreach_copy_(list(one.gradients), [gradients[id(param)] for param in one.params])
        self.is_filled = True
        return True

    def has(self, param: torch.Tensor) -> bool:
        """Whether a parameter is a part of the shard."""
        return id(param) in self._params

    def step(self, params: Sequence[torch.Tensor], clip_norm: float | None) -> None:
        """Clip and update; what is not in the shard has its gradients where they always are."""
        others = [param.grad for param in params if param.grad is not None]
        if clip_norm is not None:
            self._clip(others, clip_norm)
        else:
            for one in self._shards:
                one.shard.factor.fill_(self.scale)
        if others:
            self._optimizer.step()
        for one in self._shards:
            one.shard.update(self._optimizer, one.group)
        self.is_filled = False

    def _clip(self, others: Sequence[torch.Tensor], clip_norm: float) -> None:
        """As torch clips, by the norm over all."""
        norms = [
            torch.linalg.vector_norm(one.shard.gradients, dtype=torch.float32) * self.scale for one in self._shards
        ]
        if others:
            norms += torch._foreach_norm(list(others))
        total = torch.linalg.vector_norm(torch.stack(norms))
        factor = (clip_norm / (total + 1e-6)).clamp(max=1.0)
        if others:
            torch._foreach_mul_(list(others), factor)
        for one in self._shards:
            torch.mul(factor, self.scale, out=one.shard.factor[0])

    def _spill(self) -> None:
        self.is_filled = False
        for one in self._shards:
            for param, gradient in zip(one.params, one.gradients, strict=True):
                param.grad = gradient.to(param.dtype, copy=True)


def _owners(replica: Replica, param: torch.Tensor) -> int:
    """How many modules have a parameter: one that others have, too, gets a gradient from each."""
    return sum(own is param for module in replica.module.modules() for own in module._parameters.values())


def _make_shard(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], params: list[torch.Tensor], dtype: torch.dtype
) -> _GroupShard:
    """Move parameters and what is kept for them into vectors."""
    device, starts, at = params[0].device, [], 0
    for param in params:
        starts.append(at)
        at += -(-param.numel() // _ALIGN) * _ALIGN
    keys, counts = kept_keys(optimizer, group), not isinstance(optimizer, torch.optim.SGD)
    values, *kept = (torch.zeros(at, device=device) for _ in range(1 + len(keys)))
    shard = FlatShard(
        values=values,
        gradients=torch.zeros(at, dtype=dtype, device=device),
        state=dict(zip(keys, kept, strict=True)),
        steps=torch.zeros(len(params) if counts else 1, device=device),
        factor=torch.ones(1, device=device),
    )
    gradients = []
    for number, (param, start) in enumerate(zip(params, starts, strict=True)):
        span = slice(start, start + param.numel())
        old = optimizer.state.get(param, {})
        placed = apart(values[span].view(param.shape))
        param.data = placed.copy_(param.data)
        state = {key: vector[span].view(param.shape) for key, vector in shard.state.items()}
        if counts:
            state = {"step": shard.steps[number], **state}
        for key, value in state.items():
            if old.get(key) is not None:
                value.copy_(old[key])
        optimizer.state[param] = state
        gradients.append(shard.gradients[span].view(param.shape))
    return _GroupShard(shard, group, params, gradients)
