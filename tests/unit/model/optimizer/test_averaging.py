"""Averages of parameters are those of torch's own, whatever optimizer keeps them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shoal.checkpoint.model_stream import TensorStream
from shoal.errors import CheckpointError, SpecError
from shoal.model.optimizer.averaging import (
    AVERAGE,
    average_in_use,
    average_key,
    averaged_model,
    check_average,
    with_average,
)
from shoal.model.optimizer.kinds import ELEMENTWISE, rebuild, settings_of, state_schema
from shoal.model.start import Start
from shoal.spec import Task

TASK = Task(
    model=lambda: nn.Linear(3, 2),
    optimizer=lambda params: optim.SGD(params, lr=0.1),
    loss=nn.functional.mse_loss,
    train=[1],
)
MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: optim.AdamW(params, lr=0.1),
    "Adagrad": lambda params: optim.Adagrad(params, lr=0.1),
    "Adafactor": lambda params: optim.Adafactor(params, lr=0.1),
}


def train(module: nn.Module, optimizer: optim.Optimizer, after: Callable[[int], None], steps: int = 6) -> None:
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        module(torch.randn(4, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        after(step)


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("changes", [{"ema": 0.9}, {"swa": 3}, {"swa": 1}], ids=str)
def test_they_are_what_torch_averages(kind: str, changes: dict[str, Any]) -> None:
    ours, theirs = made(), made()
    optimizer = with_average(MAKERS[kind](ours.parameters()), replace(TASK, **changes))
    train(ours, optimizer, lambda step: None)
    averages = AveragedModel(theirs, multi_avg_fn=get_ema_multi_avg_fn(0.9) if "ema" in changes else None)
    begins = changes.get("swa", 1)
    plain = MAKERS[kind](theirs.parameters())
    train(theirs, plain, lambda step: averages.update_parameters(theirs) if step >= begins else None)
    for name, param in ours.named_parameters():
        assert torch.equal(param, theirs.get_parameter(name)), "training itself is as it was"
        expected = averages.module.get_parameter(name)
        torch.testing.assert_close(optimizer.state[param][AVERAGE], expected, rtol=1e-6, atol=1e-7)


def test_what_works_element_by_element_still_does() -> None:
    params = [nn.Parameter(torch.ones(4, 5))]
    optimizer = with_average(optim.Adam(params, lr=0.1), replace(TASK, ema=0.9))
    assert type(optimizer) in ELEMENTWISE and type(optimizer).__name__ == "Adam"
    schema = state_schema(optimizer)
    assert schema is not None and AVERAGE in schema.mirrored
    twin = rebuild(optimizer, [{**settings_of(optimizer.param_groups[0]), "params": params}])
    assert type(twin) is type(optimizer)
    swa = state_schema(with_average(optim.SGD(params, lr=0.1), replace(TASK, swa=2)))
    assert swa is not None and (swa.mirrored, swa.scalars) == ((AVERAGE,), (("average_count", torch.float32),))


def test_a_scheduler_does_not_hide_it() -> None:
    module = made()
    optimizer = with_average(optim.SGD(module.parameters(), lr=0.1), replace(TASK, ema=0.5))
    optim.lr_scheduler.StepLR(optimizer, 1)
    train(module, optimizer, lambda step: None, steps=2)
    assert all(AVERAGE in optimizer.state[param] for param in module.parameters())


def test_a_parameter_that_did_not_move_has_none() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = with_average(optim.SGD([used, unused], lr=0.1), replace(TASK, ema=0.5))
    used.grad = torch.ones(2)
    optimizer.step()
    assert AVERAGE in optimizer.state[used] and AVERAGE not in optimizer.state[unused]


def test_who_keeps_one() -> None:
    params = [nn.Parameter(torch.ones(2))]
    assert average_key(optim.SGD(params, lr=0.1)) is None and average_key(optim.ASGD(params)) == "ax"
    assert average_key(with_average(optim.ASGD(params), replace(TASK, ema=0.5))) == AVERAGE
    with pytest.raises(SpecError, match="LBFGS"):
        with_average(optim.LBFGS(params), replace(TASK, ema=0.5))


def test_a_checkpoint_without_one_is_refused() -> None:
    optimizer = with_average(optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), replace(TASK, ema=0.5))
    check_average(optimizer, Start())
    check_average(optimizer, Start(step=3, optimizer={f"weight/{AVERAGE}": torch.ones(2)}))
    with pytest.raises(CheckpointError, match="step 3 has no average"):
        check_average(optimizer, Start(step=3, optimizer={"weight/momentum_buffer": torch.ones(2)}))


def test_the_model_of_the_averages() -> None:
    weight = torch.ones(2)
    model = TensorStream.of({"tied": weight, "weight": weight, "buffer": torch.zeros(1)})
    state = TensorStream.of({"weight/average": torch.full((2,), 7.0), "weight/exp_avg": torch.zeros(2)})
    found = dict(averaged_model(model, state, AVERAGE).tensors)
    assert found["weight"].tolist() == found["tied"].tolist() == [7.0, 7.0] and found["buffer"].tolist() == [0.0]


def test_parameters_are_their_averages_for_a_while() -> None:
    param = nn.Parameter(torch.ones(2))
    memory = param.data
    state = TensorStream.of({"weight/average": torch.full((2,), 7.0), "weight/exp_avg": torch.zeros(2)})
    with pytest.raises(KeyError), average_in_use({"weight": param}, state):
        assert param.tolist() == [7.0, 7.0] and memory.tolist() == [1.0, 1.0]
        raise KeyError
    assert param.data_ptr() == memory.data_ptr() and param.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("changes", [{"ema": 1.0}, {"ema": 0.0}, {"swa": 0}, {"ema": 0.9, "swa": 3}], ids=str)
def test_what_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"Task: (ema|swa)"):
        replace(TASK, **changes)
