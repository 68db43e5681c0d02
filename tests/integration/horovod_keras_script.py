"""A script that calls Keras's `fit`, as users of Horovod write it.

Each rank compares what comes of it with a model that it trains alone on everybody's batches.
"""

import sys

import keras  # before Horovod, as scripts do
import numpy as np

import horovod.keras as hvd  # isort: skip

BATCH, EPOCHS, RATE = 8, 3, 0.1

rng = np.random.default_rng(0)
X = rng.standard_normal((48, 6)).astype("float32")
Y = (X @ rng.standard_normal((6, 2))).astype("float32")
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
STEPS = len(X) // SIZE // BATCH


def make_model(optimizer):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(2)])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def batches():
    """Everybody's, in the order in which each rank has its own."""
    order = np.concatenate([np.arange(rank, len(X), SIZE).reshape(STEPS, BATCH) for rank in range(SIZE)], 1)
    return [(X[rows], Y[rows]) for rows in order]


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def fit_with_all_callbacks():
    keras.utils.set_random_seed(RANK)  # the first one's weights count
    model = make_model(hvd.DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=0.9)))
    peer = make_model(keras.optimizers.SGD(RATE, momentum=0.9))
    peer.set_weights(hvd.broadcast_object(model.get_weights(), root_rank=0))
    history = model.fit(
        X[RANK::SIZE],
        Y[RANK::SIZE],
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(initial_lr=RATE, warmup_epochs=2, momentum_correction=False),
            hvd.callbacks.LearningRateScheduleCallback(
                initial_lr=RATE, multiplier=0.5, start_epoch=2, momentum_correction=False
            ),
        ],
    ).history
    losses = []
    for epoch in range(EPOCHS):
        total = 0.0
        for step, batch in enumerate(batches()):
            passed = epoch * STEPS + step + 1
            # By then: one rank's rate at first, the whole one after two epochs, half of it from there on.
            whole = (1 + passed * (SIZE - 1) / (2 * STEPS)) / SIZE if epoch < 2 else 0.5
            peer.optimizer.learning_rate = RATE * whole
            total += float(peer.train_on_batch(*batch, return_dict=True)["loss"])
            peer.reset_metrics()
        losses.append(total / STEPS)
    close(model.get_weights(), peer.get_weights())
    close([history["loss"]], [losses])
    close([history["lr"]], [[RATE * (1 + (SIZE - 1) / 2) / SIZE, RATE, RATE / 2]])
    assert set(history) == {"loss", "mae", "lr"}
    return model, peer


def load_and_go_on(model, peer, folder):
    path = f"{folder}/model.keras"
    if RANK == 0:
        model.save(path)
    hvd.barrier()
    plain, loaded = keras.saving.load_model(path), hvd.load_model(path)
    assert type(plain.optimizer) is type(loaded.optimizer) is type(peer.optimizer)
    assert int(loaded.optimizer.iterations) == EPOCHS * STEPS
    for rows, (x, y) in zip(np.arange(RANK, len(X), SIZE).reshape(STEPS, BATCH), batches(), strict=True):
        loaded.train_on_batch(X[rows], Y[rows])
        peer.train_on_batch(x, y)
    close(loaded.get_weights(), peer.get_weights())
    close([hvd.allgather(loaded.get_weights()[0])], [np.concatenate([peer.get_weights()[0]] * SIZE)])


def accumulate_passes():
    model = make_model(
        hvd.DistributedOptimizer(
            keras.optimizers.Adam(RATE),
            backward_passes_per_step=STEPS,
            average_aggregated_gradients=True,
            gradient_predivide_factor=2.0,
        )
    )
    if RANK:
        model.set_weights([weight + 1 for weight in model.get_weights()])
    hvd.broadcast_global_variables(root_rank=0)
    peer = make_model(keras.optimizers.Adam(RATE))
    peer.set_weights(model.get_weights())
    before = model.get_weights()
    for step, rows in enumerate(np.arange(RANK, len(X), SIZE).reshape(STEPS, BATCH)):
        assert step == 0 or all(map(np.array_equal, model.get_weights(), before))
        model.train_on_batch(X[rows], Y[rows])
    peer.train_on_batch(X, Y)
    close(model.get_weights(), peer.get_weights())
    assert int(model.optimizer.iterations) == 1


def values():
    assert float(hvd.allreduce(RANK, op=hvd.Sum)) == sum(range(SIZE))
    assert hvd.allreduce([1.0, 2.0 * RANK], compression=hvd.Compression.fp16).tolist() == [1.0, SIZE - 1.0]
    assert hvd.allgather(np.full((RANK + 1, 2), RANK)).shape == (SIZE * (SIZE + 1) // 2, 2)
    assert hvd.broadcast(keras.ops.ones(2) * RANK, root_rank=1).tolist() == [1.0, 1.0]
    assert hvd.reducescatter(np.ones((SIZE, 3)), op=hvd.Sum).tolist() == [[SIZE] * 3]


fitted = fit_with_all_callbacks()
load_and_go_on(*fitted, sys.argv[1])
accumulate_passes()
values()
print("as one process")
