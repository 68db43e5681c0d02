"""An optimizer's state by whole-parameter names, independent of who holds it."""

from __future__ import annotations

import torch

from shoal.strategies.replica import Replica


def named_state(replica: Replica) -> dict[str, torch.Tensor]:
    """`parameter/key -> tensor` for an optimizer that runs on the replica's own parameters."""
    return {
        f"{name}/{key}": value.detach()
        for name, param in replica.trained.items()
        for key, value in replica.optimizer.state.get(param, {}).items()
        if isinstance(value, torch.Tensor)
    }
