"""One process of two that train the Keras perceptron, timed: `ddp` by hand, or `fit` by `shoal.keras.distribute`.

Started by `benchmarks.keras_fit` with WAY, STEPS and OUT; the first process writes the times of its steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy
import torch

from benchmarks.keras_task import BATCH_PER_PROCESS, MOMENTUM, RATE, arrays, build

import keras  # isort: skip
import shoal.keras

way, steps, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
x, y = arrays(steps, size)
keras.utils.set_random_seed(0)
times: list[float] = []


def by_hand() -> None:
    """As Keras's own guide has it: the model is a module of torch's, and DDP wraps it."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=size)
    model = build()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=RATE, momentum=MOMENTUM)
    rows = torch.from_numpy(x[rank::size]), torch.from_numpy(y[rank::size])
    for step in range(steps):
        begin = time.perf_counter()
        inputs, target = (each[step * BATCH_PER_PROCESS : (step + 1) * BATCH_PER_PROCESS] for each in rows)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(wrapped(inputs, training=True), target).backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    distributed.destroy_process_group()


class DrawnBatches(keras.utils.PyDataset):
    """Batches of all processes, which note when they are asked for: a step lies between two. (A callback that
    hears batches would have all weights copied to Keras's own variables after every step.)"""

    def __init__(self) -> None:
        super().__init__()
        self._drawn_at = 0.0

    def __len__(self) -> int:
        return steps

    def __getitem__(self, index: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        now = time.perf_counter()
        if index:
            times.append(now - self._drawn_at)
        self._drawn_at = now
        rows = slice(index * size * BATCH_PER_PROCESS, (index + 1) * size * BATCH_PER_PROCESS)
        return x[rows], y[rows]


def by_fit() -> None:
    """Keras's own loop."""
    model = shoal.keras.distribute(build())
    model.fit(DrawnBatches(), epochs=1, shuffle=False, verbose=0)


by_hand() if way == "ddp" else by_fit()
if rank == 0:
    out.write_text(json.dumps(times))
