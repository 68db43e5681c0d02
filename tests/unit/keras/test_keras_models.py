"""Keras models in torch's clothes: what has which name, what moves, who draws, and which mode Keras is told."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal.keras

import keras  # isort: skip
from keras import layers

from shoal import Task
from shoal.checkpoint.model_stream import save_tensors
from shoal.errors import TaskError
from shoal.keras.graph import KerasGraph, KerasWhole
from shoal.model.replica import Replica

X = np.random.default_rng(0).standard_normal((16, 6)).astype("float32")
Y = np.arange(16) % 3


class Net(keras.Model):
    """Calls its layers in code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm, self.dropout = layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.5)

    def call(self, x: Any, training: Any = None) -> Any:
        return self.dropout(self.norm(self.dense(x), training=training), training=training)


def line() -> keras.Model:
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(3)]
    )


def compiled(make: Any, **settings: Any) -> Any:
    def build() -> keras.Model:
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(**{"optimizer": "adam", "loss": loss, **settings})
        return model

    return build


@pytest.fixture(params=[line, Net], ids=["graph", "whole"])
def replica(request: pytest.FixtureRequest) -> Replica:
    return Replica(Task.from_keras(compiled(request.param), (X, Y)))


def test_what_moves_is_a_buffer_and_random_states_are_nothing(replica):
    module = replica.module
    assert isinstance(module, (KerasGraph, KerasWhole))
    assert {name.rpartition(".")[2] for name, _ in module.named_buffers()} == {"moving_mean", "moving_variance"}
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert replica.untrained == {}


def test_names_do_not_depend_on_what_was_built_before(replica):
    again = Replica(replica.task)
    assert list(again.module.state_dict()) == list(replica.module.state_dict())
    for mine, theirs in zip(replica.module.state_dict().values(), again.module.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_dropout_draws_from_torch_and_statistics_move(replica):
    replica.train_mode()
    x, found = torch.from_numpy(X), []
    before = {name: value.clone() for name, value in replica.module.named_buffers()}
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(replica.module(x).detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not any(torch.equal(value, before[name]) for name, value in replica.module.named_buffers())
    replica.module.eval()
    assert torch.equal(replica.module(x), replica.module(x))


def test_a_tensor_that_was_put_elsewhere_is_the_one_that_keras_uses(replica):
    """As shared memory does: parameters keep their objects, buffers do not."""
    module, x = replica.module, torch.from_numpy(X)
    module.eval()
    before = module(x)
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            owner._buffers[name] = buffer.clone() + 1
    for parameter in module.parameters():
        parameter.data = parameter.data.clone() * 2
    assert not torch.allclose(before, module(x))


def test_float64_is_that_of_all_of_it_without_dropout(replica):
    wide = Replica(replica.task, numerics="float64")
    wide.train_mode()
    x, y = torch.from_numpy(X).double(), torch.from_numpy(Y)
    before = {name: value.clone() for name, value in wide.module.named_buffers()}
    first, second = wide.module(x), wide.module(x)
    assert first.dtype == torch.float64
    assert torch.equal(first, second)
    assert not any(torch.equal(value, before[name]) for name, value in wide.module.named_buffers())
    halves = torch.stack([wide.task.loss(first[part], y[part]) for part in (slice(8), slice(8, 16))])
    torch.testing.assert_close(wide.task.loss(first, y), halves.mean(), rtol=1e-14, atol=0)
    assert keras.config.floatx() == "float32"


def test_metrics_are_those_of_evaluate():
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")]
    task = Task.from_keras(compiled(line, metrics=metrics), (X, Y), test=(X, Y))
    module = task.model().eval()
    output, target = module(torch.from_numpy(X)).detach(), torch.from_numpy(Y)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    found = {name: metric.value([metric.keep(output[:5], target[:5]), metric.keep(output[5:], target[5:])])
             for name, metric in task.metrics.items()}  # fmt: skip
    fresh = task.model()
    fresh.load_state_dict(state)
    for part in fresh.modules():
        for bound in part.__dict__.get("bound", ()):
            bound.refresh()
    expected = fresh.keras_model.evaluate(X, Y, verbose=0, return_dict=True)
    assert found == pytest.approx({name: expected[name] for name in found})
    assert float(task.loss(output, target)) == pytest.approx(expected["loss"])


def test_a_trained_model_is_keras_own_again(tmp_path):
    task = Task.from_keras(compiled(line), (X, Y))
    module = task.model()
    with torch.no_grad():
        for value in module.state_dict().values():
            value.add_(0.5)
    save_tensors(tmp_path / "model.safetensors", module.state_dict())
    model = shoal.keras.trained(task, tmp_path / "model.safetensors")
    expected = module.eval()(torch.from_numpy(X)).detach().numpy()
    np.testing.assert_allclose(model.predict(X, verbose=0), expected, rtol=1e-6)
    model.save(tmp_path / "model.keras")
    np.testing.assert_allclose(
        keras.saving.load_model(tmp_path / "model.keras").predict(X, verbose=0), expected, rtol=1e-6
    )


def test_class_weights_are_those_of_fit():
    weights = {0: 3.0, 1: 0.5}
    task = Task.from_keras(compiled(line), (X, Y), class_weight=weights)
    output = task.model().eval()(torch.from_numpy(X)).detach()
    losses = torch.nn.functional.cross_entropy(output, torch.from_numpy(Y), reduction="none")
    counted = torch.tensor([weights.get(int(y), 1.0) for y in Y])
    assert float(task.loss(output, torch.from_numpy(Y))) == pytest.approx(
        float((losses * counted).mean()), rel=1e-5
    )


def masked() -> keras.Model:
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(3)(layers.GRU(4)(layers.Embedding(9, 4, mask_zero=True)(inputs))))


def punished() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), layers.Dense(3, kernel_regularizer="l2")])


@pytest.mark.parametrize("make", [masked, punished])
def test_what_travels_beside_outputs_keeps_a_model_whole(make):
    module = Task.from_keras(compiled(make), (np.abs(X), Y)).model()
    assert isinstance(module, KerasWhole)


class OwnStep(Net):
    """Updates its weights itself."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (line, "not compiled"),
        (lambda: torch.nn.Linear(1, 1), "must return a Keras model, found Linear"),
        (compiled(OwnStep), "put its loss into compute_loss"),
        (compiled(line, loss=keras.losses.SparseCategoricalCrossentropy(reduction="sum")), "reduction='sum'"),
    ],
)
def test_what_cannot_be_is_said(build, sentence):
    with pytest.raises(TaskError, match=sentence):
        Task.from_keras(build, (X, Y))


def test_a_made_model_is_refused():
    with pytest.raises(TaskError, match="every process makes the model for itself"):
        Task.from_keras(compiled(line)(), (X, Y))


def test_the_example_learns_both_of_its_outputs():
    path = Path(__file__).parents[3] / "examples" / "keras_two_heads.py"
    spec = importlib.util.spec_from_file_location("example_keras_two_heads", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    replica = Replica(example.task())
    inputs, target = replica.task.train.rows(np.arange(64))
    replica.module.eval()
    before = replica.task.loss(replica.module(inputs), target)
    assert float(before["loss"]) == pytest.approx(
        0.9 * float(before["profile_loss"]) + 0.1 * float(before["digit_loss"]), rel=1e-6
    )
    before["loss"].backward()
    assert all(parameter.grad is not None for parameter in replica.trained.values())
    replica.optimizer.step()
    after = replica.task.loss(replica.module(inputs), target)
    assert all(float(after[name]) < float(before[name]) for name in before)
    assert set(replica.task.metrics) == {"profile_mae", "digit_accuracy"}
