"""What a push does to rows: pure functions of rows, what is kept of them, and what was pushed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.errors import SpecError, unknown

Apply = Callable[[Tensor, list[Tensor], Tensor, Mapping[str, float]], None]
"""Changes rows and what is kept of them, by what was pushed and the settings."""


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """One optimizer. Only rows that were pushed change, as lazy updates of embeddings are."""

    apply: Apply
    defaults: Mapping[str, float]
    """Its settings."""
    num_kept: int
    """Tables of the values' own shape that it keeps."""


def _decayed(rows: Tensor, pushed: Tensor, settings: Mapping[str, float]) -> Tensor:
    decay = settings["weight_decay"]
    return pushed.add(rows, alpha=decay) if decay else pushed


def _sgd(rows: Tensor, kept: list[Tensor], pushed: Tensor, settings: Mapping[str, float]) -> None:
    gradient = _decayed(rows, pushed, settings)
    if settings["momentum"]:
        kept[0].mul_(settings["momentum"]).add_(gradient)
        gradient = kept[0]
    rows.add_(gradient, alpha=-settings["lr"])


def _adagrad(rows: Tensor, kept: list[Tensor], pushed: Tensor, settings: Mapping[str, float]) -> None:
    gradient = _decayed(rows, pushed, settings)
    kept[0].addcmul_(gradient, gradient)
    rows.addcdiv_(gradient, kept[0].sqrt().add_(settings["eps"]), value=-settings["lr"])


def _adam(rows: Tensor, kept: list[Tensor], pushed: Tensor, settings: Mapping[str, float]) -> None:
    gradient, (mean, square, steps) = _decayed(rows, pushed, settings), kept
    steps.add_(1)  # of each row, which is as often as it was pushed
    mean.lerp_(gradient, 1 - settings["beta1"])
    square.mul_(settings["beta2"]).addcmul_(gradient, gradient, value=1 - settings["beta2"])
    unbiased = square.div(1 - settings["beta2"] ** steps).sqrt_().add_(settings["eps"])
    rows.addcdiv_(mean.div(1 - settings["beta1"] ** steps), unbiased, value=-settings["lr"])


RULES = {
    "sgd": UpdateRule(apply=_sgd, defaults={"lr": 0.01, "momentum": 0.0, "weight_decay": 0.0}, num_kept=1),
    "adagrad": UpdateRule(apply=_adagrad, defaults={"lr": 0.01, "eps": 1e-10, "weight_decay": 0.0}, num_kept=1),
    "adam": UpdateRule(
        apply=_adam,
        defaults={"lr": 0.001, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
        num_kept=3,
    ),
}


_NOT_PLAIN = (
    *("amsgrad", "dampening", "decoupled_weight_decay", "initial_accumulator_value"),
    *("lr_decay", "maximize", "nesterov"),
)
"""Settings of torch's that rules do not have."""


def num_kept(name: str, settings: Mapping[str, float]) -> int:
    """Tables that a rule keeps with these settings."""
    return 0 if name == "sgd" and not settings["momentum"] else RULES[name].num_kept


def settings_of(name: str, given: Mapping[str, Any]) -> dict[str, float]:
    """All settings of a rule; refuses what it has not."""
    if name not in RULES:
        raise unknown("kv: the optimizer", name, RULES)
    defaults = RULES[name].defaults
    for key, value in given.items():
        if key not in defaults:
            raise unknown(f"kv: the setting of {name}", key, defaults)
        if not isinstance(value, int | float):
            raise SpecError(f"kv: {key} of {name} is a number, found {value!r}; give one.")
    return {**defaults, **{key: float(value) for key, value in given.items()}}


def read_optimizer(optimizer: torch.optim.Optimizer) -> tuple[str, dict[str, float]]:
    """The rule that does what an optimizer of torch's does, with the settings that it has now."""
    name, groups = type(optimizer).__name__.lower(), [dict(group) for group in optimizer.param_groups]
    for group in groups:
        if "betas" in group:
            group["beta1"], group["beta2"] = group["betas"]
    if name not in RULES or any(group.get(key) for group in groups for key in _NOT_PLAIN):
        raise SpecError(
            f"kv: servers update by {', '.join(RULES)} in their plain forms, found {optimizer!r}; "
            "choose one of these, without more."
        )
    found = [{key: float(group[key]) for key in RULES[name].defaults} for group in groups]
    if any(settings != found[0] for settings in found):
        raise SpecError(
            f"kv: servers update all keys with the same settings, found {optimizer!r}; make it one group."
        )
    return name, found[0]
