"""The formulas of Keras's optimizers as optimizers of torch, so that each slice can be updated by itself.

torch's own of the same names compute other things: Keras's momentum holds the learning rate, its Adam adds epsilon
before the correction of the bias, its RMSprop inside the root. Each class follows what Keras's torch backend does,
operation by operation. What Keras counts once (`iterations`) is counted here for each parameter that moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

Settings = dict[str, Any]
"""Of a group: the learning rate, and what its rule is set with."""
Kept = dict[str, Tensor]
"""For one parameter."""
COUNT, AVERAGE = "iterations", "keras_average"
"""What is kept for a parameter besides its rule's own: how many updates it had, and its moving average."""


class KerasRule(Optimizer):
    """What all rules have in common: clipping by value, weight decay, the moving average and the count."""

    settings: ClassVar[tuple[str, ...]] = ()
    """What the rule is set with, by Keras's own names."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        weight_decay: float | None = None,
        clipvalue: float | None = None,
        ema_momentum: float | None = None,
        ema_overwrite_frequency: int | None = None,
        **rule: Any,
    ) -> None:
        """`ema_momentum`: None where no average is kept. `rule`: the rule's own settings."""
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "clipvalue": clipvalue,
                "ema_momentum": ema_momentum,
                "ema_overwrite_frequency": ema_overwrite_frequency,
                **rule,
            },
        )

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
                    self._take(param, param.grad, group)
        return loss

    def _take(self, param: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            # Created at once, so that the state's layout is known after one step.
            state[COUNT] = torch.zeros(())
            state.update(self.begin(param, group))
            if group["ema_momentum"] is not None:
                state[AVERAGE] = torch.zeros_like(param)
        count = 0 if state[COUNT].is_meta else int(state[COUNT])
        limit = group["clipvalue"]
        if limit:
            gradient = gradient.clamp(-limit, limit)
        if group["weight_decay"] is not None:
            param.mul_(1 - group["weight_decay"] * group["lr"])
        self.update(param, gradient, state, count, group)
        if group["ema_momentum"] is not None:
            self._average(param, state[AVERAGE], count, group)
        state[COUNT] += 1

    @staticmethod
    def _average(param: Tensor, average: Tensor, count: int, group: dict[str, Any]) -> None:
        momentum = group["ema_momentum"] if count else 0.0
        average.mul_(momentum).add_(param, alpha=1 - momentum)
        every = group["ema_overwrite_frequency"]
        if every and (count + 1) % every == 0:
            param.copy_(average)

    def begin(self, param: Tensor, rule: Settings) -> Kept:
        """What the rule keeps for a parameter, before its first update."""
        return {}

    def update(self, param: Tensor, gradient: Tensor, state: Kept, count: int, rule: Settings) -> None:
        """The rule. `count`: how many updates there were before."""
        raise NotImplementedError


class KerasSGD(KerasRule):
    """`keras.optimizers.SGD`."""

    settings = ("momentum", "nesterov")

    def begin(self, param: Tensor, rule: Settings) -> Kept:
        """Velocity, which holds the learning rate."""
        return {"momentum": torch.zeros_like(param)} if rule["momentum"] else {}

    def update(self, param: Tensor, gradient: Tensor, state: Kept, count: int, rule: Settings) -> None:
        """Along the velocity; with `nesterov` from where that leads."""
        lr, momentum = rule["lr"], rule["momentum"]
        if not momentum:
            param.add_(gradient, alpha=-lr)
            return
        velocity = state["momentum"].mul_(momentum).add_(gradient, alpha=-lr)
        if rule["nesterov"]:
            param.add_(gradient, alpha=-lr).add_(velocity, alpha=momentum)
        else:
            param.add_(velocity)


class KerasAdam(KerasRule):
    """`keras.optimizers.Adam` and `AdamW`, which differ in their weight decay's default."""

    settings = ("beta_1", "beta_2", "epsilon", "amsgrad")

    def begin(self, param: Tensor, rule: Settings) -> Kept:
        """Moments, and the largest second ones where `amsgrad` asks for them."""
        names = ("momentum", "velocity", *(("velocity_hat",) if rule["amsgrad"] else ()))
        return {name: torch.zeros_like(param) for name in names}

    def update(self, param: Tensor, gradient: Tensor, state: Kept, count: int, rule: Settings) -> None:
        """Epsilon is added to the root of the uncorrected moment."""
        first, second, number = rule["beta_1"], rule["beta_2"], count + 1
        alpha = rule["lr"] * (1 - second**number) ** 0.5 / (1 - first**number)
        momentum = state["momentum"].mul_(first).add_(gradient, alpha=1 - first)
        velocity = state["velocity"].mul_(second).add_(gradient * gradient, alpha=1 - second)
        if rule["amsgrad"]:
            velocity = torch.maximum(state["velocity_hat"], velocity, out=state["velocity_hat"])
        param.sub_((momentum * alpha).div_(velocity.sqrt().add_(rule["epsilon"])))


class KerasRMSprop(KerasRule):
    """`keras.optimizers.RMSprop`."""

    settings = ("rho", "momentum", "epsilon", "centered")

    def begin(self, param: Tensor, rule: Settings) -> Kept:
        """The mean of squares, and what momentum and centring need."""
        names = ["velocity"]
        names += ["momentum"] if rule["momentum"] > 0 else []
        names += ["average_gradient"] if rule["centered"] else []
        return {name: torch.zeros_like(param) for name in names}

    def update(self, param: Tensor, gradient: Tensor, state: Kept, count: int, rule: Settings) -> None:
        """Epsilon is added under the root."""
        rho = rule["rho"]
        velocity = state["velocity"].mul_(rho).add_(gradient * gradient, alpha=1 - rho)
        below = velocity + rule["epsilon"]
        if rule["centered"]:
            mean = state["average_gradient"].mul_(rho).add_(gradient, alpha=1 - rho)
            below.sub_(mean * mean)
        increment = (gradient * rule["lr"]).div_(below.sqrt_())
        if rule["momentum"] > 0:
            increment = state["momentum"].mul_(rule["momentum"]).add_(increment)
        param.sub_(increment)


class KerasAdagrad(KerasRule):
    """`keras.optimizers.Adagrad`."""

    settings = ("initial_accumulator_value", "epsilon")

    def begin(self, param: Tensor, rule: Settings) -> Kept:
        """The sum of squares, which begins above zero."""
        return {"accumulator": torch.full_like(param, rule["initial_accumulator_value"])}

    def update(self, param: Tensor, gradient: Tensor, state: Kept, count: int, rule: Settings) -> None:
        """Epsilon is added under the root."""
        accumulator = state["accumulator"].add_(gradient * gradient)
        param.sub_((gradient * rule["lr"]).div_((accumulator + rule["epsilon"]).sqrt_()))


class KerasAdadelta(KerasRule):
    """`keras.optimizers.Adadelta`."""

    settings = ("rho", "epsilon")

    def begin(self, param: Tensor, rule: Settings) -> Kept:
        """Means of squares: of gradients, and of steps."""
        return {name: torch.zeros_like(param) for name in ("accumulated_grad", "accumulated_delta_var")}

    def update(self, param: Tensor, gradient: Tensor, state: Kept, count: int, rule: Settings) -> None:
        """A step has the size of past ones."""
        rho, epsilon = rule["rho"], rule["epsilon"]
        squares, steps = state["accumulated_grad"], state["accumulated_delta_var"]
        squares.mul_(rho).add_(gradient * gradient, alpha=1 - rho)
        delta = (steps + epsilon).sqrt_().mul_(gradient).div_((squares + epsilon).sqrt_()).neg_()
        steps.mul_(rho).add_(delta * delta, alpha=1 - rho)
        param.add_(delta, alpha=rule["lr"])


class KerasAdamax(KerasRule):
    """`keras.optimizers.Adamax`."""

    settings = ("beta_1", "beta_2", "epsilon")

    def begin(self, param: Tensor, rule: Settings) -> Kept:
        """The first moment, and the norm that the second one goes to."""
        return {name: torch.zeros_like(param) for name in ("momentum", "norm")}

    def update(self, param: Tensor, gradient: Tensor, state: Kept, count: int, rule: Settings) -> None:
        """The largest gradient, which fades, takes the place of a root."""
        first, second = rule["beta_1"], rule["beta_2"]
        momentum = state["momentum"].mul_(first).add_(gradient, alpha=1 - first)
        norm = state["norm"].mul_(second)
        torch.maximum(norm, gradient.abs(), out=norm)
        below = (norm + rule["epsilon"]).mul_(1 - first ** (count + 1))
        param.sub_((momentum * rule["lr"]).div_(below))


class KerasLion(KerasRule):
    """`keras.optimizers.Lion`."""

    settings = ("beta_1", "beta_2")

    def begin(self, param: Tensor, rule: Settings) -> Kept:
        """The momentum."""
        return {"momentum": torch.zeros_like(param)}

    def update(self, param: Tensor, gradient: Tensor, state: Kept, count: int, rule: Settings) -> None:
        """By the sign alone."""
        first, second, momentum = rule["beta_1"], rule["beta_2"], state["momentum"]
        direction = (momentum * first).add_(gradient, alpha=1 - first).sign_()
        param.sub_(direction.mul_(rule["lr"]))
        momentum.mul_(second).add_(gradient, alpha=1 - second)


RULES: tuple[type[KerasRule], ...] = (
    KerasSGD,
    KerasAdam,
    KerasRMSprop,
    KerasAdagrad,
    KerasAdadelta,
    KerasAdamax,
    KerasLion,
)
