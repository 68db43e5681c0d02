"""A compiled Keras model with two outputs, trained by two processes: handwritten digits, and where their ink is.

    shoal train examples/keras_two_heads.py --workers 2
    shoal train examples/keras_two_heads.py --workers 2 --strategy layer
    shoal train examples/keras_two_heads.py --workers 2 --strategy ps:sync=ssp:3
    shoal verify examples/keras_two_heads.py --workers 2 --strategy pipeline

Loss, loss weights, optimizer and metrics are those that `compile` is given. Under `layer` each branch runs on a
worker of its own, at the same time.

Expected: an accuracy (`digit_accuracy`) of about 0.95 after 10 epochs, in seconds.
"""

import numpy as np

import shoal.keras

import keras  # isort: skip  (after shoal.keras, so that it computes with torch)
from keras import layers


def build() -> keras.Model:
    """Two branches look at the image; one head says where ink is, the other, which digit it makes."""
    image = keras.Input((64,), name="image")
    shapes = layers.Dense(64)(image)
    shapes = layers.Activation("relu")(layers.BatchNormalization()(shapes))
    pixels = layers.Dropout(0.2)(layers.Dense(64, activation="relu")(image))
    both = layers.concatenate([shapes, pixels])
    profile = layers.Dense(16, name="profile")(shapes)
    digit = layers.Dense(10, activation="softmax", name="digit")(layers.Dense(32, activation="relu")(both))
    model = keras.Model(image, [profile, digit])
    model.compile(
        optimizer=keras.optimizers.Adam(0.005),
        loss=["mse", "sparse_categorical_crossentropy"],
        loss_weights=[0.9, 0.1],
        metrics=[["mae"], ["accuracy"]],
    )
    return model


def task() -> shoal.Task:
    """What to train."""
    train, test = (_with_profiles(*part.tensors) for part in shoal.datasets.digits())
    return shoal.Task.from_keras(build, train, test=test, batch_size=64, epochs=10)


def _with_profiles(images, digits):
    """Images, and both targets: the mean of each row and column, and the digit."""
    pixels = images.numpy().reshape(-1, 8, 8)
    profiles = np.concatenate([pixels.mean(1), pixels.mean(2)], axis=1)
    return images.numpy(), (profiles, digits.numpy())


if __name__ == "__main__":
    run = shoal.train(__file__, workers=2)
    model = shoal.keras.trained(task(), run.folder / "model.safetensors")
    model.save("two_heads.keras")
