"""The rules by which a flat shard is updated: parameters, gradients and what the optimizer keeps, each one vector.

Gradients may be in half precision: they are widened, multiplied by a factor (that of clipping, say) and used in
one go. On a GPU that is one kernel (`update_kernel.py`); elsewhere it is the torch expression here, which is
also what the kernel is held to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import optim

if TYPE_CHECKING:
    from shoal.step.update_kernel import Kernels

BOUND = 1e-5
"""So far may a step of the kernel be from torch's own, relative to what the step changes: both compute in float32,
and round in another order."""
_KINDS = (optim.AdamW, optim.Adam, optim.SGD)


@dataclass(kw_only=True)
class FlatShard:
    """Vectors of equal length, and what belongs to all of their elements."""

    values: torch.Tensor
    """Parameters, in float32."""
    gradients: torch.Tensor
    """In float32 or half precision."""
    state: Mapping[str, torch.Tensor]
    """By key: what the optimizer keeps of each element, in float32."""
    steps: torch.Tensor
    """By parameter: the steps that it has seen, always as many; empty where the optimizer does not count."""
    factor: torch.Tensor
    """What gradients are multiplied by; one number."""
    _kernels: Kernels | None = field(default=None, repr=False)

    def update(self, optimizer: optim.Optimizer, group: Mapping[str, Any]) -> None:
        """Take a step with the settings of one of the optimizer's groups. Its learning rate may be a tensor."""
        if not self.values.is_cuda:
            with torch.no_grad():
                _update(self, optimizer, group)
            return
        if self._kernels is None:
            from shoal.step.update_kernel import Kernels

            self._kernels = Kernels(self.values.device, group.get("betas"))
        if isinstance(optimizer, optim.SGD):
            self._kernels.sgd(self, group["lr"], group)
        else:
            self._kernels.adam(self, group["lr"], group, decoupled=_is_decoupled(optimizer, group))


def kept_keys(optimizer: optim.Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    """What an optimizer keeps of each element."""
    if isinstance(optimizer, optim.SGD):
        return ("momentum_buffer",) if group["momentum"] else ()
    return "exp_avg", "exp_avg_sq"


def why_not_flat(optimizer: optim.Optimizer) -> str:
    """Why an optimizer has no rule here; empty where it has one."""
    if type(optimizer) not in _KINDS:
        return f"{type(optimizer).__name__} is none of {', '.join(kind.__name__ for kind in _KINDS)}"
    for group in optimizer.param_groups:
        for key in ("amsgrad", "maximize", "dampening", "differentiable"):
            if group.get(key):
                return f"{type(optimizer).__name__} has {key}={group[key]}"
    return ""


def _is_decoupled(optimizer: optim.Optimizer, group: Mapping[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, optim.AdamW)))


def _update(shard: FlatShard, optimizer: optim.Optimizer, group: Mapping[str, Any]) -> None:
    """The same in torch's own operations."""
    rate, decay, values = group["lr"], group["weight_decay"], shard.values
    gradients = shard.gradients.float() * shard.factor
    if isinstance(optimizer, optim.SGD):
        change = gradients + decay * values
        if group["momentum"]:
            moved = shard.state["momentum_buffer"].mul_(group["momentum"]).add_(change)
            change = change + group["momentum"] * moved if group["nesterov"] else moved
        values.sub_(rate * change)
        return
    means, squares, (beta1, beta2) = shard.state["exp_avg"], shard.state["exp_avg_sq"], group["betas"]
    step = float(shard.steps.add_(1)[0])
    if _is_decoupled(optimizer, group):
        values.sub_(rate * decay * values)
    else:
        gradients = gradients + decay * values
    means.lerp_(gradients, 1 - beta1)
    squares.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    scaled = squares.sqrt() / (1 - beta2**step) ** 0.5 + group["eps"]
    values.sub_(rate / (1 - beta1**step) * means / scaled)
