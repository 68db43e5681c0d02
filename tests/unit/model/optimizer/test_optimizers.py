"""What is learnt about optimizers: their state, their groups, and whether fused kernels may be used."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from shoal.model.optimizer.kinds import prefer_fused, rebuild, settings_of, state_schema
from shoal.optim import SAG

STATE = {
    optim.SGD: (set(), set()),
    optim.Adam: ({"exp_avg", "exp_avg_sq"}, {"step"}),
    optim.AdamW: ({"exp_avg", "exp_avg_sq"}, {"step"}),
    optim.Adagrad: ({"sum"}, {"step"}),
    optim.Adadelta: ({"square_avg", "acc_delta"}, {"step"}),
    optim.Adamax: ({"exp_avg", "exp_inf"}, {"step"}),
    optim.NAdam: ({"exp_avg", "exp_avg_sq"}, {"step", "mu_product"}),
    optim.RAdam: ({"exp_avg", "exp_avg_sq"}, {"step"}),
    optim.RMSprop: ({"square_avg"}, {"step"}),
    optim.Rprop: ({"prev", "step_size"}, {"step"}),
    optim.ASGD: ({"ax"}, {"step", "eta", "mu"}),
    SAG: ({f"history_{slot}" for slot in range(8)}, {"step"}),
}


def _param(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cls", STATE, ids=lambda cls: cls.__name__)
def test_state_of_every_elementwise_optimizer(cls: type, dtype: torch.dtype) -> None:
    schema = state_schema(cls([_param(4, 5, dtype=dtype)], lr=0.1))
    assert schema is not None
    assert (set(schema.mirrored), {key for key, _ in schema.scalars}) == STATE[cls]


def test_settings_of_any_group_count() -> None:
    plain, heavy = _param(3), _param(4)
    groups = [{"params": [plain]}, {"params": [heavy], "momentum": 0.9}]
    assert state_schema(optim.SGD(groups, lr=0.1)).mirrored == ("momentum_buffer",)
    assert "max_exp_avg_sq" in state_schema(optim.Adam([plain], amsgrad=True)).mirrored
    assert "momentum_buffer" in state_schema(optim.RMSprop([plain], momentum=0.5)).mirrored


def test_the_probe_leaves_the_optimizer_alone() -> None:
    param = _param(3)
    optimizer = optim.Adam([param], lr=0.1)
    state_schema(optimizer)
    assert not optimizer.state and param.grad is None and torch.equal(param, torch.ones(3))


def test_others_are_not_elementwise() -> None:
    class Mine(optim.SGD):
        """May do anything in its step."""

    params = [_param(3, 4)]
    for optimizer in (Mine(params, lr=0.1), optim.LBFGS(params), optim.Adafactor(params), optim.Muon(params)):
        assert state_schema(optimizer) is None


def test_rebuilding_keeps_groups_and_defaults() -> None:
    first, second = _param(3), _param(2, 2)
    original = optim.AdamW(
        [{"params": [first], "weight_decay": 0.0}, {"params": [second], "lr": 5.0}], lr=0.5, betas=(0.8, 0.9)
    )
    pieces = [_param(2), _param(1)]
    groups = [
        {**settings_of(group), "params": [piece]}
        for group, piece in zip(original.param_groups, pieces, strict=True)
    ]
    again = rebuild(original, groups)
    assert type(again) is optim.AdamW and again.defaults == original.defaults
    for old, new, piece in zip(original.param_groups, again.param_groups, pieces, strict=True):
        assert settings_of(old) == settings_of(new)
        assert new["params"] == [piece]


def test_rebuilding_named_parameters() -> None:
    original = optim.SGD([("weight", _param(3))], lr=0.1)
    piece = _param(2)
    again = rebuild(original, [{**settings_of(original.param_groups[0]), "params": [piece]}])
    assert again.param_groups[0]["params"] == [piece]


@pytest.mark.parametrize("cls", [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad])
def test_fused_where_nobody_chose(cls: type) -> None:
    optimizer = cls([_param(3)], lr=0.1)
    prefer_fused(optimizer)
    assert all(group["fused"] is True for group in optimizer.param_groups)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD([p], lr=0.1, foreach=True),
        lambda p: optim.SGD([p], lr=0.1, foreach=False),
        lambda p: optim.Adam([p], fused=False),
        lambda p: optim.Adam([p], differentiable=True),
        lambda p: optim.Adam([p], lr=torch.tensor(0.1)),
        lambda p: optim.SGD([{"params": [p]}, {"params": [_param(2, dtype=torch.bfloat16)]}], lr=0.1),
        lambda p: optim.SGD([{"params": [p]}, {"params": [_param(2)], "foreach": True}], lr=0.1),
        lambda p: optim.RMSprop([p]),
    ],
)
def test_the_users_choice_stays(make) -> None:
    optimizer = make(_param(3))
    before = [settings_of(group) for group in optimizer.param_groups]
    prefer_fused(optimizer)
    assert [settings_of(group) for group in optimizer.param_groups] == before
