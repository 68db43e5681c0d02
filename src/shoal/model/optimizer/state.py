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
    for name, keys in by_parameter(replica.start.optimizer).items():
        if name in replica.trained:
            param = replica.trained[name]
            replica.optimizer.state[param] = copied_state(param, keys)


def copied_state(param: torch.Tensor, keys: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A parameter's state as torch's own load makes it: a copy of one's own, strided as the parameter. Step counts
    stay in the host's memory."""
    return {
        key: torch.empty_like(param).copy_(value)
        if value.shape == param.shape
        else value.to(value.device if value.numel() == 1 else param.device, copy=True)
        for key, value in keys.items()
    }


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
