"""Keras's own `fit` in two processes that `shoal run` starts: its history, callbacks and files are as ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import TaskError
from shoal.launch.owner import ZygoteProcess
from shoal.launch.scripts import run_script
from shoal.spec import Cluster

SCRIPT = """
import json, os, sys
import shoal.keras
import keras
import numpy as np
from keras import layers
from shoal.keras.installed import in_numbers, wide

folder, kind, strategy = sys.argv[1:]
rank = int(os.environ.get("RANK", 0))
rng = np.random.default_rng(0)
X = rng.standard_normal((80, 12))
Y, Z = (X @ rng.standard_normal((12, 4))).argmax(1), X @ rng.standard_normal((12, 3))

class Shrink(keras.callbacks.Callback):
    # Changes weights after an epoch, and, where Keras's own loop runs, after each batch.

    def on_epoch_end(self, epoch, logs=None):
        for variable in self.model.variables:
            if "moving" in variable.path or "kernel" in variable.path:
                variable.assign(0.9 * variable)

if strategy.startswith("data"):
    Shrink.on_train_batch_end = Shrink.on_epoch_end

with in_numbers("float64"), wide():
    keras.utils.set_random_seed(3 + rank)  # the first one's weights count
    inputs = keras.Input((12,))
    hidden = layers.Dense(16, activation="relu")(inputs)
    if "batchnorm" in strategy:
        hidden = layers.BatchNormalization()(hidden)
    model = keras.Model(inputs, {"label": layers.Dense(4)(hidden), "values": layers.Dense(3)(hidden)})
    model.compile(
        keras.optimizers.Adam(0.01),
        {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "values": "mse"},
        loss_weights={"label": 0.1, "values": 0.9},
        metrics={"label": ["accuracy"], "values": ["mae"]},
    )
    if kind == "together":
        shoal.keras.distribute(model, strategy=strategy)
    targets = {"label": Y, "values": Z}
    history = model.fit(
        X, targets, batch_size=24, epochs=5, initial_epoch=1, shuffle=False, verbose=0,
        sample_weight=np.linspace(0.5, 1.5, 80), validation_data=(X, targets),
        callbacks=[
            keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=50.0),
            keras.callbacks.EarlyStopping(monitor="loss", patience=2, min_delta=50.0, restore_best_weights=True),
            keras.callbacks.CSVLogger(f"{folder}/log-{rank}.csv"),
            Shrink(),
        ],
    )
    model.layers[1].trainable = False
    model.compile(keras.optimizers.SGD(0.01), {**model.loss, "values": "mae"})
    again = model.fit(X, targets, 24, 2, 0, shuffle=False)
    model.save_weights(f"{folder}/model-{rank}.weights.h5")
    history.history |= {f"again {name}": values for name, values in again.history.items()}
    model.save(f"{folder}/model-{rank}.keras")
    found = {
        "history": {name: [float(value) for value in values] for name, values in history.history.items()},
        "evaluate": model.evaluate(X, targets, verbose=0),
        "predict": {name: rows.tolist() for name, rows in model.predict(X[:4], verbose=0).items()},
    }
json.dump(found, open(f"{folder}/{kind}-{rank}.json", "w"))
"""


OWN_STEP = """
import json, os, sys
import shoal.keras
import keras
import numpy as np
import torch
from keras import layers
from shoal.keras.installed import in_numbers, wide

folder, kind = sys.argv[1:]
rank = int(os.environ.get("RANK", 0))
rng = np.random.default_rng(0)
X = rng.standard_normal((80, 12))
Y = (X @ rng.standard_normal((12, 4))).argmax(1)

class Penalised(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.last = layers.Dense(16, activation="relu"), layers.Dense(4)
        self.second = keras.optimizers.SGD(0.01)

    def call(self, x, training=None):
        return self.last(self.hidden(x))

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        x = x.detach().requires_grad_()
        predicted = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=predicted)
        slope = torch.autograd.grad(predicted.square().sum(), x, create_graph=True)[0]
        (loss + 0.1 * slope.square().sum(1).mean()).backward()
        with torch.no_grad():
            for optimizer, layer in ((self.optimizer, self.hidden), (self.second, self.last)):
                optimizer.apply([v.value.grad for v in layer.trainable_weights], layer.trainable_weights)
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}

with in_numbers("float64"), wide():
    keras.utils.set_random_seed(3 + rank)  # the first one's weights count
    model = Penalised()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    if kind == "together":
        shoal.keras.distribute(model)
    history = model.fit(X, Y, batch_size=20, epochs=3, shuffle=False, verbose=0, validation_data=(X, Y))
    found = {
        "history": {name: [float(value) for value in values] for name, values in history.history.items()},
        "evaluate": model.evaluate(X, Y, verbose=0),
        "predict": {"rows": model.predict(X[:4], verbose=0).tolist()},
    }
json.dump(found, open(f"{folder}/{kind}-{rank}.json", "w"))
"""


def flat(found: Any) -> dict[str, Any]:
    """All numbers by their names."""
    answer = {f"history {name}": values for name, values in found["history"].items()}
    answer["evaluate"] = found["evaluate"]
    return answer | {name: [x for row in rows for x in row] for name, rows in found["predict"].items()}


@pytest.mark.parametrize(
    "strategy",
    [
        "data:batchnorm=sync",
        "ps:servers=2",
        pytest.param("sharded:batchnorm=sync", marks=pytest.mark.long),
        pytest.param("pipeline:microbatches=2", marks=pytest.mark.long),
        pytest.param("layer", marks=pytest.mark.long),
    ],
)
def test_two_processes_fit_as_one(tmp_path: Path, zygote: ZygoteProcess, strategy: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    alone_folder = tmp_path / "alone"
    alone_folder.mkdir()
    run_script(
        script, [str(alone_folder), "alone", strategy], cluster=Cluster(workers=1, threads=1), zygote=zygote
    )
    alone = flat(json.loads((alone_folder / "alone-0.json").read_text()))
    assert len(alone["history loss"]) == 3 and alone["history learning_rate"][-1] < 0.01  # callbacks had their say
    run_script(script, [str(tmp_path), "together", strategy], cluster=Cluster(workers=2, threads=1), zygote=zygote)
    for rank in (0, 1):
        ours = flat(json.loads((tmp_path / f"together-{rank}.json").read_text()))
        assert ours.keys() == alone.keys()
        for name, values in alone.items():
            assert ours[name] == pytest.approx(values, rel=1e-9, abs=1e-9), (rank, name)
    assert {path.name for path in tmp_path.iterdir() if path.suffix in (".csv", ".h5", ".keras")} == {
        "log-0.csv",
        "model-0.keras",
        "model-0.weights.h5",
    }


LEARNING = """
import json, os, sys
import shoal.keras
import keras
import numpy as np
from keras import layers

rng = np.random.default_rng(0)
X = rng.standard_normal((96, 12)).astype("float32")
Y = (X @ rng.standard_normal((12, 4))).argmax(1)
hidden = [layers.Dense(32, activation="relu"), layers.BatchNormalization(momentum=0.5), layers.Dropout(0.1)]
model = keras.Sequential([keras.Input((12,)), *hidden, layers.Dense(4)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.optimizer.learning_rate = 0.02
shoal.keras.distribute(model, strategy=sys.argv[1])
first = model.fit(X, Y, batch_size=24, epochs=6, verbose=0, validation_data=(X, Y)).history
again = model.fit(X[:80], Y[:80], batch_size=16, epochs=2, verbose=0).history
assert len(first["loss"]) == 6 and len(again["accuracy"]) == 2
assert again["loss"][-1] < 0.6 * first["loss"][0], (first, again)
assert int(model.optimizer.iterations) == 6 * 4 + 2 * 5
json.dump(first, open(f"history-{os.environ['RANK']}.json", "w"))
"""


@pytest.mark.parametrize(
    "strategy",
    [
        "data",
        "ps:sync=asp",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("ps:sync=ssp:3", "average:every=4")),
    ],
)
def test_it_learns_at_every_pace_and_goes_on_with_other_data(
    tmp_path: Path, zygote: ZygoteProcess, strategy: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(LEARNING.replace("history-", f"{tmp_path}/history-"))
    run_script(script, [strategy], cluster=Cluster(workers=2, threads=1), zygote=zygote)
    first, second = (json.loads((tmp_path / f"history-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second


def test_a_step_of_the_models_own_is_made_by_all(tmp_path: Path, zygote: ZygoteProcess) -> None:
    """With a penalty that no compiled loss has, and an optimizer for each layer."""
    script = tmp_path / "script.py"
    script.write_text(OWN_STEP)
    for kind, workers in (("alone", 1), ("together", 2)):
        run_script(script, [str(tmp_path), kind], cluster=Cluster(workers=workers, threads=1), zygote=zygote)
    alone = flat(json.loads((tmp_path / "alone-0.json").read_text()))
    for rank in (0, 1):
        ours = flat(json.loads((tmp_path / f"together-{rank}.json").read_text()))
        assert ours.keys() == alone.keys()
        for name, values in alone.items():
            assert ours[name] == pytest.approx(values, rel=1e-9, abs=1e-9), (rank, name)


def test_what_only_a_run_can_do_is_said() -> None:
    import shoal.keras

    import keras  # isort: skip

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(TaskError, match="a compiled Keras model is needed"):
        shoal.keras.distribute(model)
    model.compile("sgd", "mse")
    shoal.keras.distribute(model, strategy="sharded")
    with pytest.raises(TaskError, match="takes arrays x and y, or a DataLoader, found generator"):
        model.fit(each for each in ())

    class Own(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    own = Own([keras.Input((2,)), keras.layers.Dense(1)])
    own.compile("sgd", "mse")
    with pytest.raises(TaskError, match="Own has a train_step of its own"):
        shoal.keras.distribute(own, strategy="ps")
