"""Inspection: what a task is made of and whether it can be repeated, without training it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.checkpoint import save_tensors
from shoal.ledger import Cut, Order
from shoal.observe.disk import write_whole
from shoal.roles.feed import Feed
from shoal.roles.loading import load_task
from shoal.roles.reporter import Reporter
from shoal.spec import Job, Task, World
from shoal.strategies.base import Work
from shoal.strategies.gradients import backward_part
from shoal.strategies.replica import Replica

FILE_NAME = "inspection.json"


def inspect(job: Job, world: World, reporter: Reporter) -> None:
    """Leave the initial model and a page of facts in the run folder."""
    reporter.on_state("starting", 0)
    task = load_task(job)
    train = task.dataset("train")
    probe = Probe(task, train, "task")
    double = Probe(task, train, "float64")
    replica, folder = probe.replica, Path(job.run_dir)
    reporter.on_state("ready", 0)
    save_tensors(folder / "model.safetensors", replica.module.state_dict())
    facts = {
        "trained": list(replica.trained),
        "untrained": list(replica.untrained),
        "buffers": [name for name, _ in replica.module.named_buffers()],
        "optimizer": type(replica.optimizer).__name__,
        "num_samples": len(train),
        "batch_size": task.batch_size,
        "batch_per_worker": task.batch_per_worker,
        "has_batchnorm": any(isinstance(module, _BatchNorm) for module in replica.module.modules()),
        "repeatable": probe.is_repeatable(),
        "random": probe.is_random(),
        "random_in_float64": double.is_random(),
    }
    write_whole(folder / FILE_NAME, json.dumps(facts) + "\n")
    reporter.done({"samples": len(train)})


class Probe:
    """Computes the loss of the first batch under different keys of the random numbers."""

    def __init__(self, task: Task, train: object, numerics: str) -> None:
        length = len(train)  # type: ignore[arg-type]
        order = Order(length, task.seed, shuffle=task.shuffle)
        self._seed = task.seed
        self._feed = Feed(task, train, numerics=numerics)
        samples = order.samples(0, 0, min(task.batch_size, length))
        self._cut = Cut(0, samples, len(samples))
        self.replica = Replica(task, numerics=numerics, sample=lambda: self._feed.batch(samples[:1]))

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
        loss, _ = backward_part(self.replica, Work(1, (part,), key), part)
        # Running statistics moved; the next probe, and the saved model, start where this one did.
        with torch.no_grad():
            module.load_state_dict(initial)
        module.zero_grad(set_to_none=True)
        return loss
