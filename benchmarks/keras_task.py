"""The perceptron of the other benchmarks as a Keras model: a task, and what a loop by hand needs of it."""

from __future__ import annotations

from typing import Any

import numpy as np

import shoal.keras  # noqa: F401  (before keras, which then computes with torch)

import keras  # isort: skip
from shoal import Task

BATCH_PER_PROCESS = 64
INPUTS, HIDDEN, CLASSES = 1024, [2048] * 5, 1000
RATE, MOMENTUM = 0.01, 0.9


def build() -> Any:
    """20.9 M parameters, compiled with SGD and momentum."""
    dense = [keras.layers.Dense(width, activation="relu") for width in HIDDEN]
    model = keras.Sequential([keras.Input((INPUTS,)), *dense, keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(RATE, momentum=MOMENTUM), loss)
    return model


def arrays(steps: int, processes: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples for so many steps of all processes."""
    rng = np.random.default_rng(0)
    rows = steps * processes * BATCH_PER_PROCESS
    return rng.standard_normal((rows, INPUTS), dtype=np.float32), rng.integers(0, CLASSES, rows)


def task(steps: int, processes: int) -> Task:
    """One pass over them."""
    return Task.from_keras(build, arrays(steps, processes), batch_size=processes * BATCH_PER_PROCESS, epochs=1)
