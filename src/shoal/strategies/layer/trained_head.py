"""A group's head while it trains: its own optimizer, and what a checkpoint keeps of both."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shoal.model.optimizer.kinds import prefer_fused, settings_of
from shoal.model.optimizer.state import by_parameter, restore_state, state_by_name
from shoal.model.replica import Replica

_VALUE = "value"
"""Stands among the optimizer's keys for the parameter itself."""


class TrainedHead:
    """Moves by an optimizer like the task's, with the settings that the task's scheduler has left."""

    def __init__(self, module: nn.Module, replica: Replica, reads: str) -> None:
        self.module = module
        self.params = dict(module.named_parameters())
        self.reads = reads
        """The step of the model whose result it reads."""
        self._optimizer = replica.task.optimizer(list(self.params.values()))
        self._task_optimizer = replica.optimizer
        prefer_fused(self._optimizer)
        self.was_saved = self._load(replica.start.aside)
        """Whether it goes on where an earlier run left it."""

    def step(self) -> None:
        """Move by the gradients that are there."""
        groups, others = self._optimizer.param_groups, self._task_optimizer.param_groups
        for group, other in zip(groups, others, strict=False):  # a head need not have parameters for all groups
            group.update(settings_of(other))
        self._optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """All of it, by names of its own."""
        values = {f"{name}/{_VALUE}": param.detach() for name, param in self.params.items()}
        found = values | state_by_name(self._optimizer, self.params)
        return {f"head/{self.reads}/{name}": tensor for name, tensor in found.items()}

    def _load(self, saved: Mapping[str, torch.Tensor]) -> bool:
        """Go on where an earlier run left it, if one had the same."""
        states = by_parameter(saved)
        found = {name: states.get(f"head/{self.reads}/{name}", {}) for name in self.params}
        if any(
            _VALUE not in found[name] or found[name][_VALUE].shape != self.params[name].shape for name in found
        ):
            return False
        for name, param in self.params.items():
            param.data.copy_(found[name].pop(_VALUE))
        restore_state(self._optimizer, self.params, found)
        return True
