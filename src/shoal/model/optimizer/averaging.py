"""Averages of the parameters over steps, kept by the optimizer that takes the steps.

What an optimizer keeps lies where its strategy wants it: once per host, at the servers, cut among workers. It is
saved with them, and who takes a dead worker's place finds it. So an average is one more number for each element,
and no strategy knows of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import ASGD, LBFGS, Optimizer

from shoal.errors import CheckpointError, SpecError

if TYPE_CHECKING:
    from shoal.checkpoint.model_stream import TensorStream
    from shoal.model.start import Start
    from shoal.spec import Task

AVERAGE, COUNT = "average", "average_count"
"""What is kept for a parameter: its average, and over how many steps, where that matters."""
_EMA, _SWA = "ema", "swa"
"""The settings of a group: as in the task."""
_ASGD_AVERAGE = "ax"


class Averaging(Optimizer):
    """Goes before the class of a user's optimizer: takes its step, and averages each parameter that moved."""

    def step(self, closure: Any = None) -> Any:
        """As the user's; an own one may take no closure."""
        own: Any = super()
        loss = own.step() if closure is None else own.step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                moved = [param for param in group["params"] if param.grad is not None]
                if _EMA in group:
                    self._weigh(moved, group[_EMA])
                else:
                    self._add(moved, group[_SWA])
        return loss

    # Torch wraps the steps of classes that it makes an optimizer of: that of the user's has hooks enough.
    step.hooked = True  # type: ignore[attr-defined]

    def _weigh(self, moved: list[torch.Tensor], decay: float) -> None:
        """Exponentially: each step counts `decay` times as much as the next."""
        known = [param for param in moved if AVERAGE in self.state[param]]
        if known:
            torch._foreach_lerp_([self.state[param][AVERAGE] for param in known], known, 1 - decay)
        for param in moved:
            if AVERAGE not in self.state[param]:
                self.state[param][AVERAGE] = param.detach().clone(memory_format=torch.preserve_format)

    def _add(self, moved: list[torch.Tensor], start: int) -> None:
        """All steps from `start` on count the same; before that, the last one alone."""
        for param in moved:
            state = self.state[param]
            if AVERAGE not in state:
                state[AVERAGE] = torch.empty_like(param, memory_format=torch.preserve_format)
                state[COUNT] = torch.zeros(())
            state[COUNT] += 1
            taken = 1 if param.is_meta else int(state[COUNT]) - start + 1
            if taken > 1:
                state[AVERAGE].lerp_(param, 1 / taken)
            else:
                state[AVERAGE].copy_(param)


@cache
def averaged_class(kind: type[Optimizer]) -> type[Optimizer]:
    """A class of optimizers that average besides; it has the same name, for it is what the user asked for."""
    return cast(type[Optimizer], type(kind.__name__, (Averaging, kind), {}))


def with_average(optimizer: Optimizer, task: Task) -> Optimizer:
    """The task's optimizer, which keeps an average where the task asks for one."""
    if task.ema is None and task.swa is None:
        return optimizer
    if isinstance(optimizer, LBFGS):
        raise SpecError(
            "Task: ema and swa are kept with what the optimizer keeps, but that of LBFGS cannot be handed on; use "
            "another."
        )
    optimizer.__class__ = averaged_class(type(optimizer))  # type: ignore[arg-type]  # a class can be hashed
    for group in optimizer.param_groups:
        group.update({_EMA: task.ema} if task.swa is None else {_SWA: task.swa})
    return optimizer


def average_key(optimizer: Optimizer) -> str | None:
    """Under which key the optimizer keeps an average of each parameter; None where it keeps none."""
    if isinstance(optimizer, Averaging):
        return AVERAGE
    return _ASGD_AVERAGE if isinstance(optimizer, ASGD) else None


def check_average(optimizer: Optimizer, start: Start) -> None:
    """A run that goes on with an average needs one to go on from."""
    is_averaged = any(path.endswith(f"/{AVERAGE}") for path in start.optimizer)
    if isinstance(optimizer, Averaging) and start.step and not is_averaged:
        raise CheckpointError(
            f"The checkpoint of step {start.step} has no average of the parameters, which ema or swa would go on "
            "with; leave it out, or begin anew from the checkpoint's weights with --from."
        )


@contextmanager
def average_in_use(params: Mapping[str, torch.Tensor], state: TensorStream) -> Iterator[None]:
    """Let these parameters be their averages for a while, in this process alone: what others share stays."""
    own = {name: param.data for name, param in params.items()}
    for path, average in state.tensors:
        name, _, key = path.rpartition("/")
        if key == AVERAGE and name in params:
            params[name].data = average
    try:
        yield
    finally:
        for name, data in own.items():
            params[name].data = data


def averaged_model(model: TensorStream, state: TensorStream, key: str) -> TensorStream:
    """The model with the averages in the place of the parameters. Takes all of the state, and keeps these."""
    averages: dict[str, torch.Tensor] = {}
    for path, tensor in state.tensors:
        name, _, own = path.rpartition("/")
        if own == key:
            averages[model.same.get(name, name)] = tensor.detach().cpu().clone()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in model.tensors:
            yield name, averages.get(model.same.get(name, name), value)

    return replace(model, tensors=tensors())
