"""The parameters of the plain server: its optimizer does what a local loop does, and nothing changes halfway."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.errors import SpecError
from shoal.ps.plain.table import ParameterTable

OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def values_of(table: ParameterTable) -> dict[str, torch.Tensor]:
    return table.copies()[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_a_local_loop_bit_by_bit(name):
    model, table = net(), ParameterTable(net(), OPTIMIZERS[name])
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for step in range(1, 8):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        if step == 4:
            model[2].bias.grad = None  # torch leaves it alone then: neither momentum nor decay
        gradients = {key: param.grad for key, param in model.named_parameters() if param.grad is not None}
        assert table.update(gradients) == step
        optimizer.step()
    for key, param in model.named_parameters():
        assert torch.equal(values_of(table)[key], param)
        assert not torch.equal(net().get_parameter(key), param)


def test_without_an_optimizer_updates_are_added():
    table = ParameterTable({"w": torch.ones(3), "n": torch.tensor([1, 2])}, None)
    assert table.update({"w": torch.full((3,), 0.5), "n": torch.tensor([1, 1])}) == 1
    assert values_of(table)["w"].tolist() == [1.5] * 3 and values_of(table)["n"].tolist() == [2, 3]


def test_values_are_stored_and_averaged():
    table = ParameterTable({"w": torch.zeros(2), "n": torch.tensor([1])}, OPTIMIZERS["momentum"])
    assert table.store({"w": torch.tensor([4.0, 8.0])}) == 1
    assert table.average({"w": torch.zeros(2)}, 0.25) == 2
    assert values_of(table)["w"].tolist() == [3.0, 6.0]
    with pytest.raises(SpecError, match="floating types can be averaged"):
        table.average({"w": torch.zeros(2), "n": torch.tensor([3])}, 0.5)
    assert values_of(table)["w"].tolist() == [3.0, 6.0] and table.version == 2


def test_what_is_given_and_what_is_lent_never_changes():
    given = {"w": torch.zeros(2)}
    table = ParameterTable(given, None)
    version, lent = table.copies(["w"])
    table.update({"w": torch.ones(2)})
    assert version == 0 and lent["w"].tolist() == given["w"].tolist() == [0.0, 0.0]
    assert values_of(table)["w"].tolist() == [1.0, 1.0]


def test_a_refused_change_leaves_everything_as_it_was():
    model = net()
    model[0].bias.requires_grad_(False)
    table = ParameterTable(model, OPTIMIZERS["adamw"])
    gradients = {name: torch.ones_like(param) for name, param in model.named_parameters()}
    with pytest.raises(SpecError, match=r"'0\.bias' was sent, but the server's optimizer does not train it"):
        table.update(gradients)
    with pytest.raises(SpecError, match="float32 \\[3\\]"):
        table.store({"0.weight": torch.ones(8, 4), "2.bias": torch.ones(3)})
    with pytest.raises(SpecError, match=r"'2\.bais' is not known"):
        table.copies(["2.bais"])
    assert table.version == 0
    assert all(torch.equal(values_of(table)[name], param) for name, param in model.named_parameters())
    table.store({"0.bias": torch.ones(8)})  # fixed for the optimizer only


def test_a_failing_optimizer_leaves_no_gradient_behind():
    table = ParameterTable(
        {"w": torch.zeros(2), "b": torch.zeros(1)}, lambda params: torch.optim.SparseAdam(params)
    )
    with pytest.raises(RuntimeError):
        table.update({"w": torch.ones(2)})
    assert table.version == 0 and all(value.grad is None for value in table._values.values())


@pytest.mark.parametrize(
    ("parameters", "optimizer", "sentence"),
    [
        ({}, None, "found none"),
        (nn.ReLU(), None, "found none"),
        ({"w": 3.0}, None, "found <class 'float'> as 'w'"),
        ({"w": torch.zeros(1).to_sparse()}, None, "dense"),
        ({"w": torch.zeros(1)}, lambda params: torch.optim.LBFGS(params), "LBFGS"),
        ({"w": torch.zeros(1)}, lambda params: params, "makes a torch.optim optimizer"),
        ({str(n): torch.zeros(1) for n in range(5000)}, None, "found 5000; spread them"),
    ],
)
def test_what_cannot_be_served(parameters, optimizer, sentence):
    with pytest.raises(SpecError, match=sentence):
        ParameterTable(parameters, optimizer)
