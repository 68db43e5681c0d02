"""Records become samples like those of the task: of the same types and form, with a target that nobody needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.errors import SpecError, TaskError
from shoal.feed.feed import Feed
from shoal.roles.inference.model_inputs import ModelInputs
from shoal.roles.inference.new_inputs import NewInputs, fitted
from shoal.spec import Task


def make_task(**fields: Any) -> Task:
    return Task(
        model=lambda: nn.Linear(2, 1),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=nn.functional.mse_loss,
        train=[0],
        **fields,
    )


def test_numbers_take_the_type_and_the_form_of_the_example() -> None:
    image = torch.zeros(1, 2, 2)
    found = fitted([1, 2, 3, 4], image, 0)
    assert found.dtype == torch.float32 and found.tolist() == [[[1, 2], [3, 4]]]
    assert fitted(np.arange(3, dtype=np.uint8), torch.zeros(5, dtype=torch.int64), 0).tolist() == [0, 1, 2]
    assert fitted([2.0], np.zeros((), dtype=np.int32), 0) == 2
    assert fitted([4, 5, 6], [1, 2], 0) == [4, 5, 6], "tokens, as they are"
    assert fitted("5", 0, 0) == 5 and fitted("a text", "another", 0) == "a text"


def test_named_values_and_several_ones_are_fitted_one_by_one() -> None:
    example = {"tokens": torch.zeros(3, dtype=torch.int64), "scale": torch.zeros(()), "labels": torch.zeros(3)}
    found = fitted({"tokens": [4, 5], "scale": 2}, example, 0)
    assert found.keys() == {"tokens", "scale"}, "what the record lacks is left out"
    assert found["tokens"].dtype == torch.int64 and found["scale"].dtype == torch.float32
    left, right = fitted([[1], [2]], (torch.zeros(1), torch.zeros(1)), 0)
    assert (left.tolist(), right.tolist()) == ([1], [2])


@pytest.mark.parametrize(
    ("value", "example", "text"),
    [
        ([1, 2, 3], torch.zeros(2, 2), r"record 7 .* shape \(3,\), but this task's samples are shape \(2, 2\)"),
        (["a", "b"], torch.zeros(2), r"numbers of shape \(2,\)"),
        ([1, 2], {"left": torch.zeros(1)}, r"named values \(left\)"),
        ([1], (torch.zeros(1), torch.zeros(1)), "2 values"),
    ],
)
def test_what_does_not_fit_is_said(value: Any, example: Any, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        fitted(value, example, 7)


def test_the_tasks_own_collate_makes_batches_of_records() -> None:
    def pad(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = nn.utils.rnn.pad_sequence([inputs for inputs, _ in samples], batch_first=True)
        return rows, torch.stack([target for _, target in samples])

    task = make_task(collate=pad)
    new = NewInputs(task, [[1.0], [2.0, 3.0]], (torch.zeros(4), torch.tensor(5)))
    rows, targets = Feed(task, new).batch(np.arange(2))
    assert rows.tolist() == [[1, 0], [2, 3]] and targets.tolist() == [5, 5]


def test_dicts_are_batches_and_the_model_takes_what_it_names() -> None:
    class Named(nn.Module):
        def forward(self, left: torch.Tensor, right: torch.Tensor | None = None) -> torch.Tensor:
            return left

    class Anything(nn.Module):
        def forward(self, **named: torch.Tensor) -> torch.Tensor:
            return named["left"]

    class OfALibrary(nn.Module):
        def forward(self, left: torch.Tensor, labels: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
            return left

    new = NewInputs(make_task(), [{"left": [1, 2], "id": 3}], {"left": torch.zeros(2), "labels": torch.zeros(())})
    batch = Feed(make_task(), new).batch(np.arange(1))
    assert ModelInputs(Named()).of(batch).keys() == {"left"}
    assert ModelInputs(Anything()).of(batch).keys() == {"left", "id"}
    assert ModelInputs(OfALibrary()).of(batch).keys() == {"left"}
    assert ModelInputs(Named()).of((1, 2)) == 1 and ModelInputs(Named()).of(3) == 3
    with pytest.raises(TaskError, match=r"holds x, and its model takes left, right; let forward\(\) call"):
        ModelInputs(Named()).of({"x": 1})


def test_the_task_says_how_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 2")
    np.save(tmp_path / "b.npy", np.ones(2))
    example = (torch.zeros(2), torch.tensor(0))
    files: Any = [tmp_path / "a.txt", tmp_path / "b.npy"]
    assert NewInputs(make_task(), files, example)[1][0].tolist() == [1, 1]
    with pytest.raises(SpecError, match=r"only the task knows; set Task\(prepare=lambda path"):
        NewInputs(make_task(), files, example)[0]
    task = make_task(prepare=lambda path: torch.tensor([float(word) for word in path.read_text().split()]))
    assert NewInputs(task, files, example)[0][0].tolist() == [1, 2]
