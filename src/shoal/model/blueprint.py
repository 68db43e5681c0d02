"""How large a task's model and its optimizer's state are, found without making their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shoal.model.buffers import moving_bytes
from shoal.model.compiled import under_own_names
from shoal.model.optimizer.averaging import with_average
from shoal.model.optimizer.kinds import state_schema
from shoal.model.replica import Replica
from shoal.spec import StrategySpec, Task
from shoal.spec.model_size import CutSize, ModelSize

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """A task's model and optimizer as far as their sizes go: parameters may have no values."""

    task: Task
    module: nn.Module
    optimizer: Optimizer
    trained: Mapping[str, torch.Tensor]
    """Parameters that the optimizer updates, by name."""
    untrained: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, replica: Replica) -> Blueprint:
        """Of a model that has been made."""
        return cls(
            task=replica.task,
            module=replica.module,
            optimizer=replica.optimizer,
            trained=replica.trained,
            untrained=replica.untrained,
        )

    @classmethod
    def drawn(cls, task: Task, numerics: str = "task") -> Blueprint | None:
        """Without values; None for a model that cannot be made without them, or knows its shapes only later."""
        try:
            with torch.device("meta"):
                module = under_own_names(task.model())
                if numerics == "float64":
                    module.double()
            optimizer = with_average(task.optimizer(list(module.parameters())), task)
            in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
            named = dict(module.named_parameters())
            trained = {name: p for name, p in named.items() if p.requires_grad and id(p) in in_groups}
            untrained = {name: p for name, p in named.items() if name not in trained}
            if any(is_lazy(p) for p in named.values()):
                return None
            return cls(task=task, module=module, optimizer=optimizer, trained=trained, untrained=untrained)
        except Exception:  # whatever is wrong with the task is told where it is made in earnest
            return None


def model_size(blueprint: Blueprint) -> ModelSize:
    """Its sizes. What an optimizer keeps that runs whole is not known from here; see `whole_state_bytes`."""
    schema = state_schema(blueprint.optimizer)
    return ModelSize(
        trained=tuple(p.nbytes for p in blueprint.trained.values()),
        frozen=tuple(p.nbytes for p in blueprint.untrained.values()),
        buffers=sum(buffer.nbytes for buffer in blueprint.module.buffers()),
        moving=moving_bytes(blueprint.module),
        mirrored=() if schema is None else schema.mirrored,
        scalars=0 if schema is None else len(schema.scalars),
        whole_state=0 if schema is None else None,
    )


def whole_state_bytes(blueprint: Blueprint) -> int:
    """What the optimizer of a model without values keeps, seen by letting it take a step; 0 where it cannot."""
    optimizer = blueprint.optimizer
    if any(param.device.type != "meta" for param in blueprint.trained.values()):
        return 0
    try:
        for param in blueprint.trained.values():
            param.grad = torch.empty_like(param)
        optimizer.step()
        kept = (value for state in optimizer.state.values() for value in state.values())
        return sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))
    except Exception:  # one that asks for the loss again, or for values
        return 0
    finally:
        optimizer.state.clear()
        for param in blueprint.trained.values():
            param.grad = None


def try_cut(spec: StrategySpec, replica: Replica, batch: Any, workers: int) -> None:
    """Raise what a run under this strategy would say of a model that it cannot cut."""
    module, _, function = spec.tried_by.partition(":")
    if function:
        getattr(import_module(module), function)(spec, replica, batch, workers)


def cut_of(spec: StrategySpec, blueprint: Blueprint, workers: int) -> CutSize:
    """How a strategy cuts the model, where it has a function for that."""
    module, _, function = spec.cut_by.partition(":")
    if not function:
        return CutSize()
    found: CutSize = getattr(import_module(module), function)(spec, blueprint, workers)
    return found
