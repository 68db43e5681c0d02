"""A plan must not promise a cut that a run refuses: a model is cut for nothing, and says the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from helpers import hugging_face
from shoal.errors import ShoalError
from shoal.model.blueprint import try_cut
from shoal.model.replica import Replica
from shoal.spec import parse_strategy

PAIRS = [(torch.ones(4), 0)] * 8


def attempt(written: str, task: shoal.Task, batch: Any, workers: int = 2) -> None:
    try_cut(parse_strategy(written), Replica(task, sample=lambda: batch), batch, workers)


def plain(layers: int) -> tuple[shoal.Task, Any]:
    task = shoal.Task(
        model=lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=PAIRS,
    )
    return task, (torch.ones(3, 4), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    "written",
    ["pipeline", "pipeline:split=3+1", "layer:place=0@0+3@1", "layer:decoupled=on", "layer:phases=2", "sharded"],
)
def test_what_can_be_cut(written: str) -> None:
    attempt(written, *plain(4))


@pytest.mark.parametrize(
    ("written", "layers", "message"),
    [
        ("pipeline", 1, "2 stages were asked for, but the model has 1 layer"),
        ("mesh:pipeline=2", 1, "2 stages were asked for, but the model has 1 layer"),
        ("pipeline:split=2+1", 4, "gives 2 stages 3 layers"),
        ("layer", 4, "layers form 1 lines"),
        ("layer:place=nothing@1", 4, "'nothing', which the model does not call"),
        ("layer:decoupled=on", 1, "only 1 that follow one another"),
    ],
)
def test_what_cannot_be_cut(written: str, layers: int, message: str) -> None:
    with pytest.raises(ShoalError, match=message):
        attempt(written, *plain(layers))


def test_models_of_hugging_face() -> None:
    pytest.importorskip("transformers")
    rows = hugging_face.samples("gpt2", 4)
    task, batch = shoal.Task.from_huggingface(hugging_face.gpt2, rows), hugging_face.inputs("gpt2", 4)
    attempt("pipeline", task, batch, workers=4)
    attempt("layer:place=transformer.h.0@0+transformer.h.1@1", task, batch)
    with pytest.raises(ShoalError, match="5 stages were asked for, but the model has 4 layers"):
        attempt("pipeline", task, batch, workers=5)
    with pytest.raises(ShoalError, match="the forward of GPT2LMHeadModel cannot be followed"):
        attempt("layer:decoupled=on", task, batch)
