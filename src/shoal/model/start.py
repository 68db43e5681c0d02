"""Where a run begins: at the model that the seed makes, or where an earlier run was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shoal.errors import CheckpointError
from shoal.model.ensemble import members_of
from shoal.model.parking.parked import take_over


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a run has behind it. Every process of the run begins from the same."""

    step: int = 0
    """Steps that are committed already."""
    model: Mapping[str, torch.Tensor] | None = None
    """The module's state; None for the model that the task makes."""
    optimizer: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`parameter/key -> tensor`, whole tensors."""
    aside: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What the strategy of the earlier run kept besides; of no use to others."""
    losses: Sequence[float] = ()
    """The loss of each committed step: what a schedule that follows it has seen."""
    evaluations: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """By step: what the evaluation after it found."""
    sizes: Sequence[int] = ()
    """Samples of each slot in the last step, where they were not even."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the checkpoint says besides: the order of samples that its steps refer to."""
    members: Sequence[Mapping[str, torch.Tensor]] = ()
    """The states of an ensemble's members, where each worker begins with one of them."""

    def with_members(self, *, is_ensemble: bool) -> Start:
        """For a run in which each worker trains a member of an ensemble, with the first as the model; or for any
        other run, which can take an ensemble's weights, but not go on with what its optimizers keep."""
        members = members_of(self.model or {})
        if self.step and is_ensemble != bool(members):
            found, other = (
                ("an ensemble, and only average goes on with one", "ensemble")
                if members
                else ("one model, and an ensemble cannot go on with that", "mean")
            )
            raise CheckpointError(
                f"The checkpoint is of {found}: resume it with combine={other}, or begin anew from its weights "
                "with --from."
            )
        return replace(self, model=members[0], members=members) if members and is_ensemble else self

    def load_model(self, module: nn.Module) -> None:
        """Give the module the values that it had."""
        if self.model is None:
            return
        taken = take_over(module, self.model)
        left = {name: tensor for name, tensor in self.model.items() if name not in taken}
        try:
            missing, unexpected = module.load_state_dict(left, strict=False)
        except RuntimeError as error:
            raise _misfit(" ".join(str(error).split())) from None
        if missing := [name for name in missing if name not in taken]:
            raise _misfit(f"It has no {', '.join(missing)}.")
        if unexpected:
            raise _misfit(f"The task's has no {', '.join(unexpected)}.")


def _misfit(details: str) -> CheckpointError:
    return CheckpointError(
        f"The saved model does not fit the task's; use the arguments that it was trained with. ({details})"
    )
