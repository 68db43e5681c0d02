"""What Shoal knows about optimizers: which work element by element, what state they keep, how to rebuild them.

An elementwise optimizer treats each element by itself, so a slice of a parameter can be updated by itself. The
user's optimizer is built once, on the real parameters (so that rules like `p.dim() >= 2` see them); Shoal reads
its groups and rebuilds it over slices.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim

from shoal.model.optimizer.averaging import averaged_class
from shoal.optim import SAG
from shoal.optim.keras_rules import RULES

_PLAIN = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adagrad,
        optim.Adadelta,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.ASGD,
        SAG,
        *RULES,
    }
)
ELEMENTWISE = _PLAIN | {averaged_class(kind) for kind in _PLAIN}
"""Exactly these classes: a subclass may do anything."""
_FUSED_ON_CPU = frozenset({optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad})
_NOT_SETTINGS = frozenset({"params", "param_names"})


@dataclass(frozen=True)
class StateSchema:
    """What an elementwise optimizer keeps for each parameter."""

    mirrored: tuple[str, ...]
    """Tensors of the parameter's own shape and dtype."""
    scalars: tuple[tuple[str, torch.dtype], ...]
    """Single numbers, such as a step count."""

    @property
    def keeps_any(self) -> bool:
        """Whether there is anything to keep."""
        return bool(self.mirrored or self.scalars)


def prefer_fused(optimizer: optim.Optimizer) -> None:
    """Turn torch's fused kernels on where the user left the choice open."""
    if type(optimizer) not in _FUSED_ON_CPU:
        return
    for group in optimizer.param_groups:
        if (group.get("fused"), group.get("foreach")) != (None, None) or group.get("differentiable"):
            return
        if isinstance(group["lr"], torch.Tensor):
            return
        # In half precision fused kernels round less often than the plain ones, and so train another model.
        devices = ("cpu",) if type(optimizer) is optim.Adagrad else ("cpu", "cuda")
        if not all(
            p.device.type in devices and p.dtype in (torch.float32, torch.float64) for p in group["params"]
        ):
            return
    for group in optimizer.param_groups:
        group["fused"] = True


def begin_momentum(optimizer: optim.Optimizer) -> None:
    """Let SGD without dampening begin with a momentum of zero, from which it comes to the same. By itself it makes
    one in the first step, of all parameters or of none, and whether or not that is skipped."""
    for group in optimizer.param_groups if isinstance(optimizer, optim.SGD) else ():
        for param in group["params"] if group["momentum"] else ():
            if param.requires_grad and optimizer.state[param].get("momentum_buffer") is None:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """A group's hyper-parameters."""
    return {key: value for key, value in group.items() if key not in _NOT_SETTINGS}


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a group's settings that are others than before; a tensor is another when it is another object."""
    return {
        key: value
        for key, value in now.items()
        if key not in before
        or (before[key] is not value and (_is_tensor(value, before[key]) or before[key] != value))
    }


def _is_tensor(*values: Any) -> bool:
    return any(isinstance(value, torch.Tensor) for value in values)


def rebuild(optimizer: optim.Optimizer, groups: Sequence[dict[str, Any]]) -> optim.Optimizer:
    """An optimizer of the same class and defaults over other parameters, which keeps nothing yet."""
    if type(optimizer) not in ELEMENTWISE:
        return _likeness(optimizer, groups)
    accepted = inspect.signature(type(optimizer)).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    return type(optimizer)(list(groups), **defaults)


def _likeness(optimizer: optim.Optimizer, groups: Sequence[dict[str, Any]]) -> optim.Optimizer:
    """The same for any class, with all that its maker has put into the object.

    Neither the class nor `copy` would do: who knows what a class of the user's own wants to be called with, and
    `copy` keeps groups and state alone.
    """
    other = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    other.__dict__.pop("step", None)  # A scheduler has put one there that is bound to the original.
    other.param_groups = list(groups)
    other.state = defaultdict(dict)
    return other


def tried_on_copies(optimizer: optim.Optimizer) -> optim.Optimizer | None:
    """The same optimizer after a step on copies of its parameters, which shows what it keeps; None if it fails."""
    try:
        copies = [
            {**group, "params": list(map(_with_gradient, group["params"]))} for group in optimizer.param_groups
        ]
        twin = rebuild(optimizer, copies)
        twin.step()
    except Exception:  # Somebody else's code where it was not made to run; training is another matter.
        return None
    return twin


def _with_gradient(param: torch.Tensor) -> nn.Parameter:
    copied = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
    copied.grad = torch.full_like(copied, 1e-3) if param.requires_grad else None
    return copied


def state_schema(optimizer: optim.Optimizer) -> StateSchema | None:
    """What this optimizer keeps, learnt by letting it take a step on a few numbers; None if not elementwise."""
    if type(optimizer) not in ELEMENTWISE:
        return None
    mirrored: dict[str, None] = {}
    scalars: dict[str, torch.dtype] = {}
    for group in optimizer.param_groups:
        probe = nn.Parameter(torch.zeros(3, dtype=group["params"][0].dtype if group["params"] else None))
        probe.grad = torch.ones_like(probe)
        twin = rebuild(optimizer, [{**settings_of(group), "params": [probe]}])
        twin.step()
        for key, value in twin.state[probe].items():
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                return None
            if value.shape == probe.shape and value.dtype == probe.dtype:
                mirrored[key] = None
            elif value.numel() == 1:
                scalars[key] = value.dtype
            else:
                return None
    return StateSchema(tuple(mirrored), tuple(scalars.items()))
