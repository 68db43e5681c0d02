"""What a loss brings along, class weights for instance, in the model's numbers and on its device."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.spec import Task


def with_fitting_loss(task: Task, *, numerics: str, device: str) -> Task:
    """The task with a loss that takes what the model gives: `nn.CrossEntropyLoss(weight=…)`, or a `partial`.

    What a function of the user's own refers to cannot be seen; it has to follow its arguments itself.
    """
    is_wide = numerics == "float64"
    if task.loss is None or (device == "cpu" and not is_wide):
        return task
    return replace(task, loss=_fitted(task.loss, device, is_wide))


def _fitted(value: Any, device: str, is_wide: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, torch.float64 if is_wide and value.is_floating_point() else value.dtype)
    if isinstance(value, nn.Module):
        own = deepcopy(value).to(device)
        return own.double() if is_wide else own
    if isinstance(value, partial):
        arguments = [_fitted(each, device, is_wide) for each in value.args]
        named = {name: _fitted(each, device, is_wide) for name, each in value.keywords.items()}
        return partial(_fitted(value.func, device, is_wide), *arguments, **named)
    return value
