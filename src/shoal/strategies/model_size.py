"""How large a task's model and its optimizer's state are, found without making their values."""

from __future__ import annotations

import torch
from torch import nn

from shoal.spec import Task
from shoal.spec.model_size import ModelSize
from shoal.strategies.optimizers import state_schema


def size_up(task: Task, numerics: str = "task") -> ModelSize | None:
    """The sizes; None for a model that cannot be made without its values, or knows them only later."""
    try:
        with torch.device("meta"):
            module = task.model()
            if numerics == "float64":
                module.double()
        optimizer = task.optimizer(list(module.parameters()))
        return _size_of(module, optimizer)
    except Exception:  # whatever is wrong with the task is told where it is made in earnest
        return None


def _size_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> ModelSize:
    in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trained = [p for p in module.parameters() if p.requires_grad and id(p) in in_groups]
    known = {id(p) for p in trained}
    fixed = [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in known]
    schema = state_schema(optimizer)
    return ModelSize(
        trained=tuple(p.nbytes for p in trained),
        fixed=sum(tensor.nbytes for tensor in fixed),
        kept=0 if schema is None else len(schema.mirrored),
    )
