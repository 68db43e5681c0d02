"""A model of which only some parts are here: its own code runs, around hollow modules in place of the others.

A hollow module has the class, the attributes and the layers of the one it stands for, but no state: its parameters
and buffers are zeros that take no memory. What it computes has the right shape, and means nothing.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import nn


def without_others(module: nn.Module, parts: Set[nn.Module], present: Set[nn.Module]) -> nn.Module:
    """The same module, in which those of its `parts` are hollow that are not `present`; what is around them is a
    copy, with the state that it has besides."""
    if module in parts:
        return module if module in present else hollow(module)
    if not any(inner in parts for inner in module.modules()):
        return module
    made = _twin(module)
    vars(made).update(
        _parameters=dict(module._parameters),
        _buffers=dict(module._buffers),
        _modules={
            name: None if child is None else without_others(child, parts, present)
            for name, child in module._modules.items()
        },
    )
    return made


def hollow(module: nn.Module) -> nn.Module:
    """A module without state; it never trains, so that nothing in it moves, and nothing is drawn."""
    made = _twin(module)
    vars(made).update(vars(nn.Module()))  # no hooks either: they are for those who meet the real one
    vars(made).update(training=False, train=lambda mode=True: made)
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        vars(made)[name] = None if tensor is None else _zeros_like(tensor)
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else hollow(child)
    return made


def is_hollow(module: nn.Module) -> bool:
    """Whether this stands for another."""
    return "train" in vars(module)


def _twin(module: nn.Module) -> nn.Module:
    """Another module of the class, with the same attributes; whatever the class does when it is made or copied."""
    made: nn.Module = object.__new__(type(module))
    vars(made).update(vars(module))
    return made


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
