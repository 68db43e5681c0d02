"""Keras models as people write them, with BatchNorm and dropout: in a line, as a graph, in code of their own."""

from __future__ import annotations

import numpy as np

import shoal.keras  # noqa: F401  (before keras, which then computes with torch)

import keras  # isort: skip
from keras import layers

from shoal import Task

_RNG = np.random.default_rng(1)
X = _RNG.standard_normal((96, 12)).astype("float32")
CLASSES = (X @ _RNG.standard_normal((12, 4))).argmax(1)
VALUES = (X @ _RNG.standard_normal((12, 3))).astype("float32")
WEIGHTS = np.linspace(0.5, 1.5, len(X)).astype("float32")
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.8), momentum=0.9, nesterov=True
    ),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.01, clipvalue=0.5),
    "plain": lambda: keras.optimizers.SGD(0.1),
    "whole": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5),
}


def in_a_line(dropout: float, optimizer: str) -> keras.Model:
    """A Sequential."""
    model = keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(16),
            layers.BatchNormalization(momentum=0.8),
            layers.Activation("relu"),
            layers.Dropout(dropout),
            layers.Dense(12, activation="relu"),
            layers.Dense(4, activation="softmax"),
        ]
    )
    model.compile(OPTIMIZERS[optimizer](), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def as_a_graph(dropout: float, optimizer: str) -> keras.Model:
    """Two branches, two outputs whose losses weigh 0.9 and 0.1."""
    inputs = keras.Input((12,), name="features")
    left = layers.BatchNormalization()(layers.Dense(8, activation="relu")(inputs))
    right = layers.Dropout(dropout)(layers.Dense(8, activation="tanh")(inputs))
    values = layers.Dense(3, name="values")(left + right)
    label = layers.Dense(4, activation="softmax", name="label")(layers.concatenate([left, right]))
    model = keras.Model(inputs, [values, label])
    model.compile(
        OPTIMIZERS[optimizer](),
        ["mse", "sparse_categorical_crossentropy"],
        loss_weights=[0.9, 0.1],
        metrics=[["mae"], ["accuracy"]],
    )
    return model


class OwnCode(keras.Model):
    """Calls its layers itself, and punishes large weights."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = layers.Dense(16, kernel_regularizer=keras.regularizers.L2(1e-2))
        self.norm = layers.BatchNormalization()
        self.dropout = layers.Dropout(dropout)
        self.block = keras.Sequential([layers.Dense(8, activation="relu"), layers.BatchNormalization()])
        self.last = layers.Dense(4)

    def call(self, x, training=None):
        x = keras.ops.relu(self.norm(self.first(x), training=training))
        return self.last(self.block(self.dropout(x, training=training)))


def in_own_code(dropout: float, optimizer: str) -> keras.Model:
    """A subclass."""
    model = OwnCode(dropout)
    model.compile(
        OPTIMIZERS[optimizer](),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")],
    )
    return model


BUILDERS = {"line": in_a_line, "graph": as_a_graph, "code": in_own_code}


def made(form: str = "line", optimizer: str = "sgd", dropout: float = 0.3) -> Task:
    """A task of one of these."""
    data = (X, (VALUES, CLASSES)) if form == "graph" else (X, CLASSES)
    train = (X, CLASSES, WEIGHTS) if form == "code" else data
    return Task.from_keras(
        lambda: BUILDERS[form](dropout, optimizer), train, test=data, batch_size=24, epochs=2, shuffle=False
    )
