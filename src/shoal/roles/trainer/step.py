"""A step on a batch of one's own: where it can be taken, and what it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.errors import TaskError
from shoal.spec import Job


def why_no_step(job: Job) -> str:
    """Why a batch of one's own cannot be one step's; empty where it can."""
    conduct = job.conduct
    if conduct.servers:
        return (
            f"Trainer: step(batch) is one part of a step from each process, but with strategy={job.strategy} a "
            "coordinator hands out parts of the task's own data, and counts them; use fit(), or data."
        )
    if conduct.clients is not None:
        return (
            f"Trainer: step(batch) takes the script's own batches, but with strategy={job.strategy} each client "
            "is trained on its samples of the task's; use fit(), or leave clients out."
        )
    if not conduct.takes_batches:
        why = "lets processes take turns with batches" if conduct.is_relay else "cuts a batch's way through it"
        return (
            f"Trainer: step(batch) takes each batch through the model at once, but strategy={job.strategy} {why}; "
            "use fit(), or data, sharded or tensor."
        )
    if any(count != 1 for count in conduct.slots_per_worker):
        return (
            f"Trainer: step(batch) is one part per process, but slots={conduct.slots} for "
            f"{job.cluster.workers}; leave slots at its default, or use fit()."
        )
    return ""


def num_samples(batch: Any) -> int:
    """Samples of a batch: the length of its first tensor."""
    part = batch
    while not isinstance(part, torch.Tensor):
        parts = part.values() if isinstance(part, Mapping) else part if isinstance(part, list | tuple) else ()
        if not parts:
            raise TaskError(
                f"Trainer: step(batch) takes tensors, in tuples, lists or dicts, found {type(part).__name__}; "
                "make them with torch.utils.data.default_collate or torch.from_numpy."
            )
        part = next(iter(parts))
    if not part.dim():
        raise TaskError("Trainer: step(batch) takes tensors with a row for each sample, found one number.")
    return len(part)
