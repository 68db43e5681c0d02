"""Inspection: what a task is made of and whether it can be repeated, without training it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.checkpoint import save_tensors
from shoal.feed.feed import Feed
from shoal.layout import Parcel
from shoal.ledger import Cut, make_order
from shoal.observe.disk import write_whole
from shoal.roles.loading import load_task
from shoal.roles.reporter import Reporter
from shoal.roles.training import make_schedule
from shoal.spec import Job, Task, World
from shoal.spec.vocabulary import State
from shoal.strategies.base import Work
from shoal.strategies.gradients import backward_part, check_weight
from shoal.strategies.mesh.tensor.cutting import explain_width
from shoal.strategies.optimizers import StateSchema, state_schema
from shoal.strategies.ps.blocks import parcels_of
from shoal.strategies.replica import Replica

FILE_NAME = "inspection.json"


def inspect(job: Job, world: World, reporter: Reporter) -> None:
    """Leave a page of facts in the run folder; with the option `probe`, which is on, also the initial model."""
    reporter.on_state(State.STARTING, 0)
    task = load_task(job)
    train = task.dataset("train")
    probe = LossProbe(task, train, "task")
    folder = Path(job.run_dir)
    reporter.on_state(State.READY, 0)
    width = explain_width(probe.replica, **job.options["width"]) if "width" in job.options else []
    facts = _facts_of_model(probe.replica) | _facts_of_data(task, train, job.options) | {"width": width}
    if job.options.get("probe", True):
        save_tensors(folder / "model.safetensors", probe.replica.module.state_dict())
        facts |= {
            "initial_loss": probe.loss(),
            "repeatable": probe.is_repeatable(),
            "random": probe.is_random(),
            "random_in_float64": LossProbe(task, train, "float64").is_random(),
        }
    write_whole(folder / FILE_NAME, json.dumps(facts) + "\n")
    reporter.done({"samples": len(train)})


def _facts_of_model(replica: Replica) -> dict[str, Any]:
    module, schema = replica.module, state_schema(replica.optimizer)
    replica.train_mode()
    parcels = parcels_of(module, replica.trained)
    return {
        "trained": list(replica.trained),
        "untrained": list(replica.untrained),
        "buffers": [name for name, _ in module.named_buffers()],
        "optimizer": type(replica.optimizer).__name__,
        "has_batchnorm": any(isinstance(layer, _BatchNorm) and layer.training for layer in module.modules()),
        "parcels": [asdict(parcel) for parcel in parcels],
        # Not known for optimizers that do not work element by element.
        "state_bytes": None if schema is None else _state_bytes(schema, parcels),
        "fixed_bytes": sum(t.numel() * t.element_size() for t in (*replica.untrained.values(), *module.buffers())),
    }


def _state_bytes(schema: StateSchema, parcels: Sequence[Parcel]) -> int:
    scalars = sum(dtype.itemsize for _, dtype in schema.scalars)
    return sum(len(schema.mirrored) * parcel.num_bytes + scalars for parcel in parcels)


def _facts_of_data(task: Task, train: Any, world: Mapping[str, Any]) -> dict[str, Any]:
    schedule = make_schedule(task, train, world.get("slots", 1), world.get("workers", 1))
    return {
        "num_samples": len(train),
        "seed": task.seed,
        "batch_size": task.batch_size,
        "batch_per_worker": task.batch_per_worker,
        "accumulate": task.accumulate,
        "global_batch": schedule.batch_size,
        "total_steps": schedule.total_steps,
    }


class LossProbe:
    """Computes the loss of the first batch under different keys of the random numbers."""

    def __init__(self, task: Task, train: Any, numerics: str) -> None:
        order = make_order(task, train, task.batch_size)
        self._seed = task.seed
        self._feed = Feed(task, train, numerics=numerics)
        samples = order.samples(0, 0, min(task.batch_size, order.length))
        self._cut = Cut(0, samples, len(samples))
        self.replica = Replica(task, numerics=numerics, sample=lambda: self._feed.batch(samples[:2]))

    def loss(self) -> float:
        """The loss of the initial model."""
        return self._loss(self._seed)

    def is_repeatable(self) -> bool:
        """Whether the same key gives the same loss."""
        return self._loss(self._seed) == self._loss(self._seed)

    def is_random(self) -> bool:
        """Whether another key gives another loss: dropout, augmentation."""
        return self._loss(self._seed) != self._loss(self._seed + 1)

    def _loss(self, key: int) -> float:
        module = self.replica.module
        initial = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        self.replica.train_mode()
        part = self._feed.part(self._cut, key, 1)
        work = Work(1, (part,), key)
        sums = backward_part(self.replica, work, part)
        check_weight(work, sums)
        # Running statistics moved; the next probe, and the saved model, start where this one did.
        with torch.no_grad():
            module.load_state_dict(initial)
        module.zero_grad(set_to_none=True)
        return sums.mean_loss
