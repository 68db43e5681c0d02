"""An optimizer's state by whole-parameter names, independent of who holds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.errors import CheckpointError, SpecError
from shoal.model.optimizer.kinds import (
    ELEMENTWISE,
    StateSchema,
    changed_settings,
    settings_of,
    tried_on_copies,
)
from shoal.model.replica import Replica
from shoal.spec import Job

COUNT = "step"
"""Where torch's optimizers keep how many steps they have made."""


def check_savable(job: Job, replica: Replica) -> None:
    """Whether the optimizer's state can be saved in this job, as far as that is known before it has any."""
    optimizer = replica.optimizer
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SpecError(
            "LBFGS keeps lists of earlier steps, and checkpoints hold tensors alone; leave --checkpoint out, or "
            "use another optimizer."
        )
    # Where the model is cut nobody may be able to hold copies of it; there `check_state` has to do.
    if type(optimizer) not in ELEMENTWISE and not job.conduct.is_cut:
        twin = tried_on_copies(optimizer)
        if twin is not None:
            _check_kept(optimizer, twin.state)
            _check_groups(optimizer, twin)


def check_state(replica: Replica) -> None:
    """Once the optimizer has its state: what is no tensor cannot be saved."""
    _check_kept(replica.optimizer, replica.optimizer.state)


def _check_kept(optimizer: torch.optim.Optimizer, state: Mapping[Any, Any]) -> None:
    for param, kept in state.items():
        if not isinstance(param, torch.Tensor):
            raise _unsavable(optimizer, str(param), "something that is no parameter's")
        for key, value in kept.items():
            if value is not None and not isinstance(value, torch.Tensor):
                raise _unsavable(optimizer, key, type(value).__name__)


def _check_groups(optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer) -> None:
    for own, tried in zip(optimizer.param_groups, twin.param_groups, strict=True):
        for key in changed_settings(settings_of(own), settings_of(tried)):
            raise _unsavable(optimizer, key, "a setting that it changes itself")


def _unsavable(optimizer: torch.optim.Optimizer, key: str, found: str) -> SpecError:
    return SpecError(
        f"{type(optimizer).__name__} keeps {key!r} as {found}, and checkpoints hold tensors alone; keep a tensor "
        "of a parameter there, or leave --checkpoint out."
    )


def named_state(replica: Replica) -> dict[str, torch.Tensor]:
    """`parameter/key -> tensor` for an optimizer that runs on the replica's own parameters."""
    return state_by_name(replica.optimizer, replica.trained)


def state_by_name(optimizer: torch.optim.Optimizer, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`parameter/key -> tensor`: what an optimizer keeps for these."""
    return {
        f"{name}/{key}": value.detach()
        for name, param in params.items()
        for key, value in optimizer.state.get(param, {}).items()
        if isinstance(value, torch.Tensor)
    }


def load_named_state(replica: Replica) -> None:
    """Give the replica's own optimizer the state that the run begins with."""
    restore_state(replica.optimizer, replica.trained, by_parameter(replica.start.optimizer))


def restore_state(
    optimizer: torch.optim.Optimizer,
    params: Mapping[str, torch.Tensor],
    states: Mapping[str, Mapping[str, torch.Tensor]],
) -> None:
    """Give an optimizer what it kept for those of these parameters that have a state here."""
    beside = counted_beside(optimizer)
    for name, param in params.items():
        if name in states:
            optimizer.state[param] = copied_state(param, states[name], counts_beside=id(param) in beside)


def counted_beside(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of those parameters beside which torch wants the count of steps; for others it is the host's."""
    return {
        id(param)
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for param in group["params"]
    }


def copied_state(
    param: torch.Tensor, keys: Mapping[str, torch.Tensor], *, counts_beside: bool = False
) -> dict[str, torch.Tensor]:
    """A parameter's state as torch's own load makes it: a copy of one's own, strided as the parameter."""

    def copied(key: str, value: torch.Tensor) -> torch.Tensor:
        if value.shape == param.shape and key != COUNT:
            return torch.empty_like(param).copy_(value)
        if value.numel() > 1:
            return value.to(param.device, copy=True)
        return copied_number(key, value, param, counts_beside=counts_beside)

    return {key: copied(key, value) for key, value in keys.items()}


def copied_number(key: str, value: torch.Tensor, param: torch.Tensor, *, counts_beside: bool) -> torch.Tensor:
    """A copy of a single number kept for a parameter, in the host's memory where nobody wants it beside."""
    return value.to(param.device if counts_beside and key == COUNT else value.device, copy=True)


def states_to_load(replica: Replica, schema: StateSchema) -> list[dict[str, torch.Tensor]]:
    """By trained parameter: the state that the run begins with, empty where it has none; checked to fit."""
    states = by_parameter(replica.start.optimizer)
    known = {*schema.mirrored, *(key for key, _ in schema.scalars)}
    for name, state in states.items():
        if name not in replica.trained:
            raise CheckpointError(
                f"The saved optimizer state is about {name!r}, which this task does not train; use the task that "
                "was saved, or begin anew from its weights with --from."
            )
        shape = replica.trained[name].shape
        if odd := [key for key in state if key not in known]:
            raise CheckpointError(
                f"The saved optimizer keeps {', '.join(sorted(odd))} for {name!r}, but "
                f"{type(replica.optimizer).__name__} keeps {', '.join(sorted(known)) or 'nothing'}; use the "
                "optimizer that was saved, or begin anew from its weights with --from."
            )
        if wrong := [key for key in schema.mirrored if key in state and state[key].shape != shape]:
            raise CheckpointError(
                f"The saved {wrong[0]} of {name!r} has shape {tuple(state[wrong[0]].shape)}, but the parameter "
                f"has {tuple(shape)}; use the arguments that the model was trained with."
            )
    return [states.get(name, {}) for name in replica.trained]


def by_parameter(state: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """`parameter -> key -> tensor`. Keys have no slash; names of parameters have dots."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for path, value in state.items():
        name, slash, key = path.rpartition("/")
        if not slash:
            raise CheckpointError(f"The saved optimizer state has {path!r}, which names no parameter.")
        found.setdefault(name, {})[key] = value
    return found
