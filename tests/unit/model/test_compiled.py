"""A compiled model is saved under the names of the one that was compiled, and is still compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.model.blueprint import Blueprint
from shoal.model.replica import Replica
from shoal.spec import Task


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 2))


@pytest.mark.parametrize("what", ["all", "a part"])
def test_names_and_values_are_those_of_the_model_itself(what: str) -> None:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def compiled() -> nn.Module:
        model = net()
        if what == "all":
            return torch.compile(model, backend=backend)
        model[1] = torch.compile(model[1], backend=backend)
        return model

    def task(model: Any) -> Task:
        return Task(
            model=model,
            loss=F.cross_entropy,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            train=[(torch.ones(4), 0)],
        )

    plain, other = Replica(task(net)), Replica(task(compiled))
    assert list(other.trained) == list(plain.trained) == list(other.module.state_dict())
    drawn = Blueprint.drawn(task(compiled))
    assert drawn is not None and list(drawn.trained) == list(plain.trained)
    inputs = torch.ones(3, 4)
    assert not graphs and torch.equal(other.module(inputs), plain.module(inputs)) and graphs
