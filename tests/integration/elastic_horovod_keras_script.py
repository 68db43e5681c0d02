"""An elastic script that calls Keras's `fit`; one of its processes ends between two commits: `FOLDER KILLS`."""

import os
import signal
import sys
from pathlib import Path

import horovod.keras as hvd
import keras
import numpy as np

EPOCHS, STEPS, BATCH = 4, 6, 8
folder, kills = Path(sys.argv[1]), int(sys.argv[2])

hvd.init()
rng = np.random.default_rng(0)
X = rng.standard_normal((EPOCHS * 48, 6)).astype("float32")
Y = (X @ rng.standard_normal((6, 1))).astype("float32")
keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.02), backward_passes_per_step=2), "mse")
before = float(model.evaluate(X, Y, verbose=0))
state = hvd.elastic.KerasState(model, epoch=0, batch=0, steps=0, sizes=[])


class CountAndDie(keras.callbacks.Callback):
    """Counts steps in what is committed; one rank dies behind a step that nobody has committed."""

    def on_train_batch_end(self, batch, logs=None):
        state.steps += 1
        state.sizes = sorted({*state.sizes, hvd.size()})
        if (
            kills
            and hvd.rank() == 1
            and state.steps == EPOCHS * STEPS // 2 + 1
            and not (folder / "killed").exists()
        ):
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state):
    while state.epoch < EPOCHS:
        # The rest of an epoch in which somebody has died, as every later one from its beginning.
        first = (state.epoch * STEPS + state.batch) * BATCH
        rows = slice(first + hvd.rank() * BATCH // hvd.size(), None)
        model.fit(
            X[rows], Y[rows], batch_size=BATCH // hvd.size(), shuffle=False, verbose=0,
            steps_per_epoch=STEPS - state.batch, epochs=1,
            callbacks=[
                hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state),
                CountAndDie(), hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
            ],
        )  # fmt: skip


train(state)
alike = hvd.allgather_object(model.get_weights()[0].tolist())
assert all(weights == alike[0] for weights in alike)
assert float(model.evaluate(X, Y, verbose=0)) < before
print("steps", state.steps, "updates", int(model.optimizer.iterations), "sizes", *state.sizes, flush=True)
