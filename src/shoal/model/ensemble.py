"""Several models of one task that are saved and used as one: what they make of their inputs, in the mean."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shoal.errors import TaskError

_NAME = "ensemble_members"
"""Of the members in a saved model: a task's own model hardly calls anything so."""
_MEMBER = re.compile(rf"{_NAME}\.(\d+)\.(.+)")


class Ensemble(nn.Module):
    """Calls all members with the same inputs. Their outputs are averaged as they are: logits as logits,
    probabilities as probabilities, so that the task's loss and metrics take them as they take a single model's."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.ensemble_members = nn.ModuleList(members)
        _look_like(self, members[0])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The mean of what the members say."""
        return mean_output([member(*args, **kwargs) for member in self.ensemble_members])


class InTurn(nn.Module):
    """The same with one module, which gets the values of each member in turn: memory holds one model's passes."""

    def __init__(self, module: nn.Module, turns: Sequence[Callable[[], None]]) -> None:
        """`turns`: by member, gives the module its values."""
        super().__init__()
        self.module = module
        self._turns = tuple(turns)
        _look_like(self, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The mean of what the members say."""
        outputs = []
        for turn in self._turns:
            turn()
            outputs.append(self.module(*args, **kwargs))
        return mean_output(outputs)


def _look_like(ensemble: nn.Module, member: nn.Module) -> None:
    """Be called as a member is: others read from a model's signature what it takes."""
    forward = ensemble.forward
    with suppress(TypeError, ValueError):
        ensemble.forward = functools.update_wrapper(functools.partial(forward), member.forward)


def mean_output(outputs: Sequence[Any]) -> Any:
    """Of outputs of one structure (tensors, tuples, dicts …) one of the same, with the mean of each tensor."""
    leaves, structures = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
    if any(structure != structures[0] for structure in structures):
        raise TaskError(
            "average: the members of an ensemble made outputs of different structures for the same inputs, which "
            "have no mean; use combine=mean."
        )
    return pytree.tree_unflatten([_mean(parts) for parts in zip(*leaves, strict=True)], structures[0])


def _mean(parts: Sequence[Any]) -> Any:
    first = parts[0]
    if not isinstance(first, torch.Tensor):
        return first
    if not (first.is_floating_point() or first.is_complex()):
        raise TaskError(
            f"average: an ensemble averages what its members say, but this task's model gives whole numbers "
            f"({first.dtype}); let it give scores, or use combine=mean."
        )
    total = first
    for part in parts[1:]:
        total = total + part
    return total / len(parts)


def member_name(index: int, name: str) -> str:
    """How a tensor of a member is called in the ensemble's state."""
    return f"{_NAME}.{index}.{name}"


def members_of(model: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The states of the members, where this is an ensemble's; else none."""
    found = dict[int, dict[str, torch.Tensor]]()
    for name, tensor in model.items():
        if (matched := _MEMBER.fullmatch(name)) is None:
            return []
        found.setdefault(int(matched[1]), {})[matched[2]] = tensor
    return [found[index] for index in sorted(found)]
