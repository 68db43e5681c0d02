"""What Horovod's interface for Keras refuses, and how a changed learning rate is made up for."""

from __future__ import annotations

import shoal.horovod.keras as hvd  # isort: skip  # before keras, which then computes with torch
import keras
import numpy as np
import pytest
import torch


def test_what_cannot_be_wrapped_is_said():
    with pytest.raises(ValueError, match=r"found SGD; for one of torch's use shoal\.horovod\.torch"):
        hvd.DistributedOptimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    optimizer = keras.optimizers.SGD()
    with pytest.raises(ValueError, match="backward_passes_per_step is 1 or more, found 0"):
        hvd.DistributedOptimizer(optimizer, backward_passes_per_step=0)
    with pytest.raises(ValueError, match="not supported with op != Average"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Sum, gradient_predivide_factor=2.0)
    assert hvd.DistributedOptimizer(optimizer) is optimizer
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(optimizer)


def test_momentum_is_corrected_for_the_batch_in_which_the_rate_changes():
    """Steps that were kept at a rate of 1 count half at a rate of a half, once."""
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    # The loss is the output itself, so every gradient is the input: 1.
    model.compile(keras.optimizers.SGD(1.0, momentum=0.5), loss=lambda target, output: output)
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(float(model.get_weights()[0][0, 0]))
    )
    model.fit(
        np.ones((4, 1)),
        np.ones((4, 1)),
        batch_size=2,
        epochs=2,
        verbose=0,
        callbacks=[hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: 0.5**epoch), watch],
    )
    # Steps: 1; 1 + 0.5 of 1; then 0.5 + 0.25 of 1.5; then 0.5 + 0.5 of 0.875.
    assert np.diff([0, *seen]).tolist() == pytest.approx([-1.0, -1.5, -0.875, -0.9375])
    assert model.optimizer.momentum == 0.5
