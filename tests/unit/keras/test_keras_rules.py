"""Keras's formulas beside Keras's own optimizers, update by update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal.keras  # noqa: F401

import keras  # isort: skip

from shoal.keras.installed import in_numbers, wide
from shoal.keras.optimizers import KerasSchedule, WholeKeras, as_torch, schedule_of
from shoal.model.optimizer.kinds import ELEMENTWISE, rebuild, settings_of, state_schema

BY_ELEMENT: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, clipvalue=0.3),
    "adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "adamax": lambda: keras.optimizers.Adamax(0.1),
    "lion": lambda: keras.optimizers.Lion(0.1),
    "averaged": lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=2),
    "scheduled": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
}
WHOLE: dict[str, Callable[[], Any]] = {
    "clipnorm": lambda: keras.optimizers.Adam(0.1, clipnorm=0.3),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.3),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
    "adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}
SHAPES = ((3, 4), (4,))


def values(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def by_keras(make: Callable[[], Any], steps: int) -> list[torch.Tensor]:
    with in_numbers("float64"), wide():
        optimizer = make()
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        variables = [
            keras.Variable(value.clone(), name=name)
            for value, name in zip(values(0), ("kernel", "bias"), strict=True)
        ]
        for step in range(steps):
            with torch.no_grad():
                optimizer.apply(values(step + 1), variables)
        return [variable.value.detach() for variable in variables]


def by_shoal(
    make: Callable[[], Any], steps: int, cut: bool = False
) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    with in_numbers("float64"), wide():
        given = make()
        given.exclude_from_weight_decay(var_names=["bias"])
        params = [nn.Parameter(value.clone()) for value in values(0)]
        variables = [
            keras.Variable(param, name=name) for param, name in zip(params, ("kernel", "bias"), strict=True)
        ]
        optimizer = as_torch(given, params, variables)
        rate = schedule_of(given)
        schedule = None if rate is None else KerasSchedule(optimizer, rate)
        for step in range(steps):
            for param, gradient in zip(params, values(step + 1), strict=True):
                param.grad = gradient
            optimizer.step()
            if schedule is not None:
                schedule.step()
    return optimizer, [param.detach() for param in params]


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_a_rule_computes_what_keras_does(name):
    optimizer, ours = by_shoal(BY_ELEMENT[name], 5)
    assert type(optimizer) in ELEMENTWISE
    for mine, theirs in zip(ours, by_keras(BY_ELEMENT[name], 5), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", WHOLE)
def test_keras_own_code_runs_where_there_is_no_rule(name):
    optimizer, ours = by_shoal(WHOLE[name], 5)
    assert isinstance(optimizer, WholeKeras)
    for mine, theirs in zip(ours, by_keras(WHOLE[name], 5), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_slices_are_updated_as_the_whole(name):
    optimizer, _ = by_shoal(BY_ELEMENT[name], 0)
    schema = state_schema(optimizer)
    assert schema is not None
    group = optimizer.param_groups[0]
    whole, parts = (
        nn.Parameter(torch.linspace(-1, 1, 6)),
        [nn.Parameter(torch.linspace(-1, 1, 6)[s]) for s in (slice(2), slice(2, 6))],
    )
    for step in range(3):
        gradient = torch.linspace(1, -2, 6) * (step + 1)
        whole.grad, parts[0].grad, parts[1].grad = gradient, gradient[:2], gradient[2:]
        if step == 0:
            twins = [rebuild(optimizer, [{**settings_of(group), "params": own}]) for own in ([whole], parts)]
        for twin in twins:
            twin.step()
    assert torch.equal(whole.detach(), torch.cat([part.detach() for part in parts]))


def test_what_a_whole_optimizer_keeps_can_be_saved():
    optimizer, first = by_shoal(WHOLE["clipnorm"], 3)
    kept = optimizer.state_dict()
    with in_numbers("float64"), wide():
        params = [nn.Parameter(value.clone()) for value in first]
        other = as_torch(WHOLE["clipnorm"](), params, [keras.Variable(param) for param in params])
        other.load_state_dict(kept)
        for step in (3, 4):
            for param, gradient in zip(params, values(step + 1), strict=True):
                param.grad = gradient
            other.step()
    _, expected = by_shoal(WHOLE["clipnorm"], 5)
    for mine, theirs in zip(params, expected, strict=True):
        torch.testing.assert_close(mine.detach(), theirs, rtol=1e-12, atol=1e-12)
