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

folder, kind = sys.argv[1:]
rank = int(os.environ.get("RANK", 0))
rng = np.random.default_rng(0)
X = rng.standard_normal((80, 12))
Y, Z = (X @ rng.standard_normal((12, 4))).argmax(1), X @ rng.standard_normal((12, 3))

with in_numbers("float64"), wide():
    keras.utils.set_random_seed(3 + rank)  # the first one's weights count
    inputs = keras.Input((12,))
    hidden = layers.BatchNormalization()(layers.Dense(16, activation="relu")(inputs))
    model = keras.Model(inputs, {"label": layers.Dense(4)(hidden), "values": layers.Dense(3)(hidden)})
    model.compile(
        keras.optimizers.Adam(0.01),
        {"label": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "values": "mse"},
        loss_weights={"label": 0.1, "values": 0.9},
        metrics={"label": ["accuracy"], "values": ["mae"]},
    )
    if kind == "together":
        shoal.keras.distribute(model, strategy="data:batchnorm=sync")
    targets = {"label": Y, "values": Z}
    history = model.fit(
        X, targets, batch_size=24, epochs=5, initial_epoch=1, shuffle=False, verbose=0,
        sample_weight=np.linspace(0.5, 1.5, 80), validation_data=(X, targets),
        callbacks=[
            keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=50.0),
            keras.callbacks.EarlyStopping(monitor="loss", patience=2, min_delta=50.0, restore_best_weights=True),
            keras.callbacks.CSVLogger(f"{folder}/log-{rank}.csv"),
        ],
    )
    model.save(f"{folder}/model-{rank}.keras")
    found = {
        "history": {name: [float(value) for value in values] for name, values in history.history.items()},
        "evaluate": model.evaluate(X, targets, verbose=0),
        "predict": {name: rows.tolist() for name, rows in model.predict(X[:4], verbose=0).items()},
    }
json.dump(found, open(f"{folder}/{kind}-{rank}.json", "w"))
"""


def flat(found: Any) -> dict[str, Any]:
    """All numbers by their names."""
    answer = {f"history {name}": values for name, values in found["history"].items()}
    answer["evaluate"] = found["evaluate"]
    return answer | {name: [x for row in rows for x in row] for name, rows in found["predict"].items()}


def test_two_processes_fit_as_one(tmp_path: Path, zygote: ZygoteProcess) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    alone_folder = tmp_path / "alone"
    alone_folder.mkdir()
    run_script(script, [str(alone_folder), "alone"], cluster=Cluster(workers=1, threads=1), zygote=zygote)
    alone = flat(json.loads((alone_folder / "alone-0.json").read_text()))
    assert len(alone["history loss"]) == 3 and alone["history learning_rate"][-1] < 0.01  # callbacks had their say
    run_script(script, [str(tmp_path), "together"], cluster=Cluster(workers=2, threads=1), zygote=zygote)
    for rank in (0, 1):
        ours = flat(json.loads((tmp_path / f"together-{rank}.json").read_text()))
        assert ours.keys() == alone.keys()
        for name, values in alone.items():
            assert ours[name] == pytest.approx(values, rel=1e-9, abs=1e-9), (rank, name)
    assert {path.name for path in tmp_path.iterdir() if path.suffix in (".csv", ".keras")} == {
        "log-0.csv",
        "model-0.keras",
    }


def test_what_only_a_run_can_do_is_said() -> None:
    import shoal.keras

    import keras  # isort: skip

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(TaskError, match="a compiled Keras model is needed"):
        shoal.keras.distribute(model)
    model.compile("sgd", "mse")
    with pytest.raises(TaskError, match="and shoal train for all strategies"):
        shoal.keras.distribute(model, strategy="ps")
