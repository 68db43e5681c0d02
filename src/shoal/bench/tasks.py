"""The benchmark's models as Shoal tasks: the same data in the same order as its peers see."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from shoal.bench.models import CYCLE, WORKLOADS, Workload
from shoal.spec import Task


def task(model: str, processes: int = 2, steps: int = 40) -> Task:
    """`steps` steps of one of the benchmark's models."""
    workload = WORKLOADS[model]()
    return Task(
        model=workload.make_model,
        loss=workload.loss,
        optimizer=workload.optimizer,
        train=lambda: samples(workload, processes),
        shuffle=False,
        batch_size=workload.batch_per_process * processes,
        epochs=-(-steps // CYCLE),
        max_steps=steps,
    )


def samples(workload: Workload, processes: int) -> TensorDataset:
    """What all peers' processes train on, one global batch behind the other."""
    batches = [workload.batch(rank, step) for step in range(CYCLE) for rank in range(processes)]
    return TensorDataset(*(torch.cat(column) for column in zip(*batches, strict=True)))
