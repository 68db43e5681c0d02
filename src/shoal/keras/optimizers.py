"""The optimizer that a Keras model was compiled with, as one of torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from shoal.errors import TaskError
from shoal.keras.installed import computing, load_keras
from shoal.optim.keras_rules import (
    KerasAdadelta,
    KerasAdagrad,
    KerasAdam,
    KerasAdamax,
    KerasLion,
    KerasRMSprop,
    KerasRule,
    KerasSGD,
)

_RULES: dict[str, type[KerasRule]] = {
    "SGD": KerasSGD,
    "Adam": KerasAdam,
    "AdamW": KerasAdam,
    "RMSprop": KerasRMSprop,
    "Adagrad": KerasAdagrad,
    "Adadelta": KerasAdadelta,
    "Adamax": KerasAdamax,
    "Lion": KerasLion,
}


def as_torch(optimizer: Any, params: Sequence[Any], variables: Sequence[Any]) -> Optimizer:
    """By its rule, so that parts of the model can be updated apart; else as a whole, by Keras's own code.

    `variables`: those of Keras whose values the parameters are.
    """
    keras = load_keras()
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise TaskError(
            "Task.from_keras: the optimizer scales losses for half precision, which Shoal does with "
            "--precision fp16; compile with the optimizer inside of it."
        )
    pairs = [(p, v) for p, v in zip(params, variables, strict=True) if p.requires_grad]
    rule = _rule_of(optimizer)
    constrained = any(variable.constraint is not None for _, variable in pairs)
    if rule is None or constrained or optimizer.clipnorm or optimizer.global_clipnorm:
        return WholeKeras([p for p, _ in pairs], optimizer, [v for _, v in pairs])
    if optimizer.gradient_accumulation_steps:
        return WholeKeras([p for p, _ in pairs], optimizer, [v for _, v in pairs])
    decays = optimizer.weight_decay is not None
    groups = [
        {
            "params": [p for p, v in pairs if optimizer._use_weight_decay(v)],
            "weight_decay": optimizer.weight_decay,
        },
        {"params": [p for p, v in pairs if not optimizer._use_weight_decay(v)], "weight_decay": None},
    ]
    return rule(
        [group for group in groups if group["params"]] if decays else [p for p, _ in pairs],
        lr=learning_rate(optimizer),
        clipvalue=optimizer.clipvalue,
        ema_momentum=optimizer.ema_momentum if optimizer.use_ema else None,
        ema_overwrite_frequency=optimizer.ema_overwrite_frequency if optimizer.use_ema else None,
        **{name: getattr(optimizer, name) for name in rule.settings},
    )


def _rule_of(optimizer: Any) -> type[KerasRule] | None:
    """Exactly Keras's own classes, or what its torch backend makes of them: a subclass may do anything."""
    kind = type(optimizer)
    if not kind.__module__.startswith("keras.src."):
        return None
    return _RULES.get(kind.__name__)


def learning_rate(optimizer: Any) -> float:
    """That of the next update."""
    return float(optimizer.learning_rate)


def schedule_of(optimizer: Any) -> Callable[[int], float] | None:
    """The learning rate by the number of updates before, where that changes."""
    keras, found = load_keras(), optimizer._learning_rate
    if isinstance(found, keras.optimizers.schedules.LearningRateSchedule):
        return lambda number: float(found(number))
    if callable(found) and not isinstance(found, keras.Variable):
        raise TaskError(
            "Task.from_keras: the learning rate is a function without arguments, which each process would call "
            "for itself; use a LearningRateSchedule, or scheduler=."
        )
    return None


class KerasSchedule(LRScheduler):
    """A schedule of Keras's: the learning rate is a function of the number of updates."""

    def __init__(self, optimizer: Optimizer, rate: Callable[[int], float]) -> None:
        self._rate = rate
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """The same for all groups, as wide as the numbers that it is to move."""
        groups = self.optimizer.param_groups
        with computing("cpu", groups[0]["params"][0].dtype):
            return [self._rate(self.last_epoch)] * len(groups)


class WholeKeras(Optimizer):
    """Keras's own code, on all parameters at once: for optimizers whose rule looks at more than an element."""

    def __init__(self, params: Sequence[Any], optimizer: Any, variables: Sequence[Any]) -> None:
        self._config = optimizer.__class__, optimizer.get_config()
        self._undecayed = [v for v in variables if not optimizer._use_weight_decay(v)]
        self._variables = list(variables)
        self._made: tuple[int, Any] | None = None
        super().__init__(params, {"lr": learning_rate(optimizer)})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; returns the closure's loss, as torch's optimizers do."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = [param for group in self.param_groups for param in group["params"]]
        before = [variable._value for variable in self._variables]
        for variable, param in zip(self._variables, params, strict=True):
            variable._value = param
        try:
            with computing(str(params[0].device), params[0].dtype):
                self._apply(params)
        finally:
            for variable, value in zip(self._variables, before, strict=True):
                variable._value = value
        return loss

    def _apply(self, params: Sequence[Any]) -> None:
        inner = self._inner()
        kept = self.state[params[0]]
        own = [variable for variable in inner.variables if variable is not inner._learning_rate]
        for number, variable in enumerate(own):
            # What was kept may have been put elsewhere, or come from a checkpoint.
            variable._value = kept.setdefault(f"keras_{number}", variable._value.detach().clone())
        inner.learning_rate = self.param_groups[0]["lr"]
        moved = [(p.grad, v) for p, v in zip(params, self._variables, strict=True) if p.grad is not None]
        if moved:
            inner.apply([gradient for gradient, _ in moved], [variable for _, variable in moved])

    def _inner(self) -> Any:
        """Keras's optimizer for this object alone: others are made from this one that have other parameters."""
        if self._made is None or self._made[0] != id(self):
            kind, config = self._config
            made = kind.from_config({**config, "learning_rate": 0.0})
            if self._undecayed:
                made.exclude_from_weight_decay(var_list=self._undecayed)
            made.build(self._variables)
            self._made = id(self), made
        return self._made[1]
