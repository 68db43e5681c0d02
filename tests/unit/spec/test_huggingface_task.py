"""`Task.from_huggingface`: what is understood of models and rows, and what is refused in a sentence."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.errors import ShoalError
from shoal.spec.huggingface import columns_of

ROWS = [{"x": [0.0, 1.0], "label": row % 2, "text": "words", "idx": row} for row in range(6)]


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor | None = None


class Classifier(nn.Module):
    """Takes columns by name, as the library's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Answer:
        logits = self.layer(x)
        return Answer(logits, None if labels is None else nn.functional.cross_entropy(logits, labels))


class Passing(nn.Module):
    """Hands all that it gets on to what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Classifier()

    def forward(self, **kwargs: Any) -> Answer:
        return self.inner(**{name: kwargs[name] for name in ("x", "labels") if name in kwargs})


@pytest.mark.parametrize("model", [Classifier, Passing])
def test_rows_become_a_loss(model: type[nn.Module]) -> None:
    task = shoal.Task.from_huggingface(model, ROWS, batch_size=3)
    assert task.collate is not None and task.objective is not None
    batch = task.collate(ROWS[:3])
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "x": (3, 2),
        "labels": (3,),
        "idx": (3,),
    }
    module = task.model()
    expected = module(x=batch["x"], labels=batch["labels"]).loss
    assert torch.equal(task.objective(module, batch), expected)
    assert task.weight is None and task.batch_size == 3  # what a batch counts is derived when it trains
    assert isinstance(task.optimizer(list(module.parameters())), torch.optim.AdamW)


def test_collators_of_the_library_and_own_fields() -> None:
    task = shoal.Task.from_huggingface(
        Classifier,
        ROWS,
        collate=lambda rows: UserDict(columns_of(rows)),
        weight=lambda batch: 7.0,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
    )
    assert task.collate is not None and type(task.collate(ROWS)) is dict
    assert task.weight is not None and task.weight({}) == 7.0
    assert isinstance(task.optimizer([nn.Parameter(torch.ones(1))]), torch.optim.SGD)


def test_rows_of_many_lengths_are_told() -> None:
    with pytest.raises(ShoalError, match=r"column 'input_ids' make no tensor .* pad them"):
        columns_of([{"input_ids": [1, 2]}, {"input_ids": [1]}])


@pytest.mark.parametrize(
    ("model", "train", "message"),
    [
        (Classifier(), ROWS, r"found one that is made \(Classifier\); write lambda: Classifier"),
        (
            Classifier,
            {"train": ROWS, "test": ROWS},
            r"has several parts \(train, test\); choose .*dataset\['train'\]",
        ),
        (3, ROWS, "model must be a function, found int"),
    ],
)
def test_what_is_not_understood(model: Any, train: Any, message: str) -> None:
    with pytest.raises(ShoalError, match=message):
        shoal.Task.from_huggingface(model, train)


def test_a_model_that_computes_no_loss_is_told() -> None:
    task = shoal.Task.from_huggingface(Classifier, ROWS)
    module = task.model()
    assert task.objective is not None
    with pytest.raises(ShoalError, match="has computed no loss from x; give it a column named labels"):
        task.objective(module, {"x": torch.ones(1, 2)})
