"""Stochastic average gradient, with a table of bounded size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from shoal.errors import SpecError
from shoal.spec.checks import require_count


class SAG(Optimizer):
    """Stochastic average gradient: steps along the average of the last gradients.

    The original (Schmidt, Le Roux and Bach, 2017) remembers one gradient per sample; here a table of bounded
    size holds those of the last `table` mini-batches. One that is `age` steps old weighs `decay ** age`, and
    the weights of the gradients present are scaled to sum to 1. `table=1` is plain gradient descent.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        table: int = 8,
        decay: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        require_count("SAG", "table", table)
        if not lr >= 0:
            raise SpecError(f"SAG: lr must not be negative, found {lr!r}.")
        if not 0 < decay <= 1:
            raise SpecError(f"SAG: decay must be above 0 and at most 1, found {decay!r}.")
        if not weight_decay >= 0:
            raise SpecError(f"SAG: weight_decay must not be negative, found {weight_decay!r}.")
        super().__init__(params, {"lr": lr, "table": table, "decay": decay, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; returns the closure's loss, as torch's optimizers do."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        assert param.grad is not None
        if param.grad.is_sparse:
            raise SpecError("SAG: a sparse gradient was found; build the embedding with sparse=False.")
        state, table = self.state[param], group["table"]
        if not state:
            # Created at once and not as they fill, so that the state's layout is known after one step.
            state["step"] = torch.zeros(())
            for row in range(table):
                state[f"history_{row}"] = torch.zeros_like(param)

        steps_before = int(state["step"])
        state[f"history_{steps_before % table}"].copy_(param.grad)
        state["step"] += 1

        weights = history_weights(min(steps_before + 1, table), group["decay"])
        direction = param.grad * weights[0]
        for age, weight in enumerate(weights[1:], start=1):
            direction += state[f"history_{(steps_before - age) % table}"] * weight
        if group["weight_decay"]:
            direction.add_(param, alpha=group["weight_decay"])
        param.add_(direction, alpha=-group["lr"])


def history_weights(entries: int, decay: float) -> list[float]:
    """The weights of the `entries` last gradients, newest first; they sum to 1."""
    raw = [decay**age for age in range(entries)]
    return [weight / sum(raw) for weight in raw]
