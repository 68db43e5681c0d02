"""Compiled Keras models train as one process does under every strategy, and as Keras's own `fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shoal.keras  # noqa: F401  (before keras, in every process)
from helpers.training import Train, largest_difference
from shoal.launch.owner import ZygoteProcess

BOUND = 1e-9
"""Between float64 numbers that were added up in another order."""


@pytest.fixture
def train(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(Path(__file__).with_name("keras_tasks.py"), tmp_path, zygote)


def fitted(form: str, optimizer: str) -> dict[str, list[float]]:
    """Keras's own history, in float64, of the model and the batches that a worker would have."""
    import keras_tasks
    import torch

    from shoal.keras.installed import wide
    from shoal.keras.loss import split_target

    task = keras_tasks.made(form, optimizer, dropout=0.0)
    torch.manual_seed(task.seed)
    model = task.model().double().keras_model
    x, target = task.train.rows(range_of(len(task.train)))
    y, weights = split_target(target)
    _, tested = task.test.rows(range_of(len(task.test)))
    with wide():
        history = model.fit(
            x, _listed(y), sample_weight=weights, batch_size=24, epochs=2, shuffle=False, verbose=0,
            validation_data=(x, _listed(tested)),
        )  # fmt: skip
    return dict(history.history)


def range_of(length: int) -> Any:
    import numpy as np

    return np.arange(length)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("form", "optimizer", "strategy", "workers"),
    [
        ("graph", "sgd", "data:batchnorm=sync", 2),
        pytest.param("line", "adamw", "data:batchnorm=sync", 4, marks=pytest.mark.long),
        pytest.param("code", "sgd", "data:batchnorm=sync", 2, marks=pytest.mark.long),
        pytest.param("line", "whole", "data:batchnorm=sync", 2, marks=pytest.mark.long),
        pytest.param("graph", "adamw", "layer", 2, marks=pytest.mark.long),
    ],
)
def test_history_is_that_of_fit(train: Train, form: str, optimizer: str, strategy: str, workers: int) -> None:
    ours = train(
        "made", workers=workers, strategy=strategy, numerics="float64", form=form, optimizer=optimizer, dropout=0.0
    )
    history = fitted(form, optimizer)
    losses = list(ours.losses().values())
    epochs = [sum(losses[start : start + 4]) / 4 for start in (0, 4)]
    assert epochs == pytest.approx(history["loss"], abs=BOUND)
    told = [dict(event["results"]) for event in ours.told("evaluation")]
    for name in (name.removeprefix("val_") for name in history if name.startswith("val_")):
        # Keras's metrics add up in float32, as the task's own model has them.
        bound = BOUND if name.endswith("loss") else 1e-6
        assert [each[name] for each in told] == pytest.approx(history[f"val_{name}"], rel=bound, abs=bound), name


@pytest.mark.parametrize(
    ("form", "strategy", "workers"),
    [
        ("line", "data", 2),
        pytest.param("code", "data", 4, marks=pytest.mark.long),
        pytest.param("line", "ps", 2, marks=pytest.mark.long),
        pytest.param("code", "ps", 2, marks=pytest.mark.long),
        pytest.param("graph", "sharded", 2, marks=pytest.mark.long),
    ],
)
def test_workers_compute_the_bits_of_one_process(train: Train, form: str, strategy: str, workers: int) -> None:
    """With dropout: seed generators follow step and slot, and BatchNorm's statistics are those of all slots."""
    ours = train("made", workers=workers, strategy=strategy, form=form)
    alone = train("made", workers=1, slots=workers, strategy="data", form=form)
    assert any("moving_mean" in name for name in ours.model)
    assert largest_difference(ours.model, alone.model) == 0.0
    assert largest_difference(ours.state, alone.state) == 0.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "strategy", "pieces"),
    [
        ("line", "pipeline:microbatches=2", 2),
        ("graph", "pipeline:microbatches=2", 2),
        ("graph", "layer", 1),
        ("line", "sharded:stage=3", 1),
    ],
)
def test_cut_models_train_as_one_process(train: Train, form: str, strategy: str, pieces: int) -> None:
    slots = 2 if strategy.startswith("sharded") else 1
    ours = train("made", workers=2, strategy=strategy, numerics="float64", form=form)
    alone = train(
        "made", slots=slots, strategy="data", numerics="float64", overrides={"accumulate": pieces}, form=form
    )
    assert largest_difference(ours.model, alone.model) <= BOUND
    assert ours.losses() == pytest.approx(alone.losses(), rel=BOUND)


@pytest.mark.long
@pytest.mark.parametrize("sync", ["asp", "ssp:3", "quorum:1/2"])
def test_workers_at_their_own_pace_learn(train: Train, sync: str) -> None:
    asked: dict[str, Any] = {"workers": 2, "form": "line", "dropout": 0.0}
    ours = train("made", strategy=f"ps:sync={sync}", overrides={"epochs": 8}, **asked)
    begun_with = train("made", strategy="data", **asked).losses()[1]
    evaluated = dict(ours.told("evaluation")[-1]["results"])  # how often, their own pace decides
    assert evaluated["loss"] < 0.8 * begun_with
