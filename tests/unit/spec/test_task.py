"""Tasks are checked when they are made; plateaus are seen when they are there."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import SpecError, TaskError
from shoal.spec import Plateau, Task

GOOD: dict[str, Any] = {
    "model": lambda: None,
    "optimizer": lambda params: None,
    "loss": lambda output, target: output,
    "train": [1, 2, 3],
}


class Made:
    """A model that was made already: it can be called, and is no function that makes one."""

    def parameters(self) -> list[float]:
        return [1.0]

    def __call__(self, value: float) -> float:
        return value


class Unlimited:
    def __getitem__(self, index: int) -> int:
        return index


class Unindexed:
    def __len__(self) -> int:
        return 3


class Rows:
    """A data set that is its own maker."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "net"}, "model must be a function, found str; write for instance model=lambda"),
        ({"model": Made()}, "found a Made that is made already; write model=lambda: Made"),
        ({"batchsize": 3}, "Task: keyword 'batchsize' is not known. Did you mean 'batch_size'"),
        ({"optimizer": None}, "optimizer must be a function, found NoneType"),
        ({"loss": None}, "exactly one of loss and objective, found neither"),
        ({"objective": lambda model, batch: 0}, "found both"),
        ({"loss": 3}, "loss must be a function"),
        ({"loss": None, "objective": 3}, "objective must be a function"),
        ({"weight": 3}, "weight must be a function"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, found 0"),
        ({"epochs": 1.5}, "epochs must be a whole number"),
        ({"accumulate": -1}, "accumulate"),
        ({"max_steps": 0}, "max_steps"),
        ({"evaluate_every": 0}, "evaluate_every"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0"),
        ({"clip_norm": float("nan")}, "clip_norm must be above 0, found nan"),
        ({"metrics": {"f1": 3}}, r"metrics\['f1'\] must be a function"),
        ({"stop": Plateau(metric="f1"), "test": [1]}, "stop watches 'f1', but the task evaluates only: loss"),
        ({"stop": Plateau()}, "there is no test set"),
        ({"train": []}, "the train set .list. is empty"),
        ({"train": Unlimited()}, "the train set .Unlimited. has no length"),
        ({"train": iter([1])}, "the train set .list_iterator. can be gone through only once"),
        ({"loaders": -1}, "loaders must be a whole number of at least 0"),
        ({"test": Unindexed()}, "the test set .Unindexed. cannot be read by index"),
        ({"train": 7}, "the train set .int. has no length"),
    ],
)
def test_what_cannot_be_trained_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Task(**{**GOOD, **fields})


def test_a_class_makes_models_and_names_are_still_shown() -> None:
    assert Task(**{**GOOD, "model": Made}).model is Made
    assert list(inspect.signature(Task).parameters)[:2] == ["model", "optimizer"]
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'train'"):
        Task(**{name: value for name, value in GOOD.items() if name != "train"})


def test_data_sets_may_be_made_later() -> None:
    made = []
    task = Task(**{**GOOD, "train": lambda: made.append(1) or [5, 6]})
    assert not made
    assert task.dataset("train") == [5, 6]
    assert len(Task(**{**GOOD, "train": Rows}).dataset("train")) == 3
    assert Task(**GOOD).dataset("train") is GOOD["train"]
    with pytest.raises(TaskError, match="is empty"):
        replace(task, train=list).dataset("train")


@pytest.mark.parametrize(
    ("plateau", "history", "reached"),
    [
        (Plateau(patience=2), [3.0, 2.0], False),
        (Plateau(patience=2), [3.0, 2.0, 2.0, 2.0], True),
        (Plateau(patience=2), [3.0, 2.0, 2.0, 1.9], False),
        (Plateau(patience=2, min_delta=0.5), [3.0, 2.0, 2.0, 1.9], True),
        (Plateau(patience=1), [1.0, 2.0], True),
        (Plateau(patience=1, mode="max"), [1.0, 2.0], False),
        (Plateau(patience=1, metric="accuracy"), [0.5, 0.6], False),
        (Plateau(patience=1, metric="error", mode="min"), [0.5, 0.6], True),
        (Plateau(patience=2, min_delta=0.0, metric="accuracy"), [0.1, 0.1, 0.1], True),
        (Plateau(patience=2, min_delta=0.0), [3.0, 2.0, 1.9999999], False),
        (Plateau(patience=3), [], False),
    ],
)
def test_a_plateau(plateau: Plateau, history: list[float], reached: bool) -> None:
    assert plateau.reached(history) is reached


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.integers(1, 4))
def test_a_metric_that_rises_is_its_negative_that_falls(history: list[float], patience: int) -> None:
    falling = Plateau(patience=patience).reached(history)
    assert Plateau(patience=patience, metric="score").reached([-value for value in history]) is falling


@pytest.mark.parametrize("fields", [{"patience": 0}, {"mode": "up"}, {"min_delta": -1.0}])
def test_plateaus_that_cannot_be(fields: dict) -> None:
    with pytest.raises(SpecError, match=f"Plateau: {next(iter(fields))}"):
        Plateau(**fields)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"keep_best": "acuracy"}, "the task evaluates only: -loss, accuracy"),
        ({"keep_best": "loss"}, "would keep the model with the largest; write '-loss'"),
        ({"keep_best": "accuracy", "test": None}, "keep_best needs evaluations"),
        ({"keep_best": "accuracy", "stop": Plateau(restore_best=True)}, "mean two models"),
    ],
)
def test_which_model_is_the_best_must_be_clear(changes, words):
    metrics = {"accuracy": lambda output, target: 1.0}
    with pytest.raises(SpecError, match=words):
        Task(**{**GOOD, "test": [1], "metrics": metrics, **changes})


def test_what_the_best_model_is_known_by():
    metrics = {"accuracy": lambda output, target: 1.0}
    tested = {**GOOD, "test": [1], "metrics": metrics}
    assert Task(**tested).best_by is None
    assert Task(**tested, keep_best="accuracy").best_by == ("accuracy", True)
    assert Task(**tested, keep_best="-loss").best_by == ("loss", False)
    assert Task(**tested, stop=Plateau(restore_best=True)).best_by == ("loss", False)


def test_a_plateau_knows_its_names() -> None:
    with pytest.raises(SpecError, match="Did you mean 'patience'"):
        Plateau(patient=3)
