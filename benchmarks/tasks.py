"""The benchmark's models as Shoal tasks: the same data in the same order as its peers see."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.counting import counting
from benchmarks.models import CYCLE, WORKLOADS, Workload
from benchmarks.straggler import slowed
from shoal.spec import Task


def task(
    model: str, processes: int = 2, steps: int = 40, straggler: str | None = None, counted: bool = False
) -> Task:
    """`steps` steps of one of the benchmark's models, all workers equally fast or with a slow one among them.

    Which of the workers this is says `SHOAL_RANK`, which the launcher sets; without it, the first. `counted`: the
    model also counts how often each sample is applied.
    """
    workload = WORKLOADS[model]()

    def make_model() -> nn.Module:
        made = workload.make_model()
        if straggler is None:
            return made
        return slowed(made, straggler, rank=int(os.environ.get("SHOAL_RANK", "0")), processes=processes)

    found = Task(
        model=make_model,
        loss=workload.loss,
        optimizer=workload.optimizer,
        train=lambda: samples(workload, processes),
        shuffle=False,
        batch_size=workload.batch_per_process * processes,
        epochs=-(-steps // CYCLE),
        max_steps=steps,
    )
    return counting(found) if counted else found


def samples(workload: Workload, processes: int) -> TensorDataset:
    """What all peers' processes train on, one global batch behind the other."""
    batches = [workload.batch(rank, step) for step in range(CYCLE) for rank in range(processes)]
    return TensorDataset(*(torch.cat(column) for column in zip(*batches, strict=True)))
