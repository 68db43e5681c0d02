"""Inspection: what a task is made of and whether it can be repeated, without training it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.checkpoint.model_stream import save_tensors
from shoal.datasets.iterated import ByPosition
from shoal.errors import ShoalError, SpecError
from shoal.feed.feed import Feed
from shoal.layout import Parcel
from shoal.ledger import Cut, make_order
from shoal.ledger.clients import held_of
from shoal.model.blueprint import Blueprint, try_cut
from shoal.model.normalising import normalises_by_batch
from shoal.model.optimizer.kinds import ELEMENTWISE, StateSchema, state_schema
from shoal.model.replica import Replica
from shoal.observe.disk import write_whole
from shoal.roles.inference.evaluator import Tables
from shoal.roles.inference.tried_batches import most_batches
from shoal.roles.loading.task import load_task
from shoal.roles.loading.weighing import derived_weight
from shoal.roles.memory.sizing import JobSizes, address_space_bytes, first_microbatch, size_up
from shoal.roles.process.reporter import Reporter
from shoal.roles.training.mean_check import seen_in, undisturbed
from shoal.roles.training.training import make_schedule, num_tables
from shoal.spec import Cluster, Job, Task, World, parse_strategy
from shoal.spec.features import check_task
from shoal.spec.model_size import PassSize
from shoal.spec.vocabulary import State
from shoal.step.clipping import cut_bytes
from shoal.step.compute import backward_part, check_weight, plain_loss
from shoal.step.pass_size import measure_pass, pass_without_values
from shoal.step.work import Work
from shoal.strategies.base import Extent
from shoal.strategies.mesh.tensor.cutting import explain_width
from shoal.strategies.ps.blocks import parcels_of

FILE_NAME = "inspection.json"


def inspect(job: Job, world: World, reporter: Reporter) -> None:
    """Leave a page of facts in the run folder; with the option `probe`, which is on, also the initial model. The
    option `job` is one whose footprint is wanted, too."""
    reporter.on_state(State.STARTING, 0)
    process_bytes, before = private_bytes(), address_space_bytes()
    task = load_task(job)
    train = task.dataset("train")
    made_bytes = address_space_bytes() - before
    probe = LossProbe(task, train, "task")
    folder = Path(job.run_dir)
    reporter.on_state(State.READY, 0)
    width = explain_width(probe.replica, **job.options["width"]) if "width" in job.options else []
    facts = _facts_of_model(probe.replica) | _facts_of_data(task, train, job.options) | {"width": width}
    if "job" in job.options:
        planned = Job.from_json(job.options["job"])
        sizes = _sizes(planned, task, train, probe.replica, made_bytes)
        facts["footprint"], facts["limited"] = sizes.footprint.plain(), sizes.limited.plain()
        facts["process_bytes"] = process_bytes
        facts["refusal"] = _refusal(planned, task, train, probe.replica)
    facts["refusals"] = _refusals(task, job.options)
    if job.options.get("probe", True):
        save_tensors(folder / "model.safetensors", probe.replica.module.state_dict())
        facts |= {
            "why_no_mean": probe.why_no_mean(),
            "initial_loss": probe.loss(),
            "repeatable": probe.is_repeatable(),
            "random": probe.is_random(),
            **_facts_of_float64(task, train),
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
        "has_batchnorm": any(normalises_by_batch(layer) and layer.training for layer in module.modules()),
        "parcels": [asdict(parcel) for parcel in parcels],
        "by_element": type(replica.optimizer) in ELEMENTWISE,
        "cut_bytes": cut_bytes(replica.task.clip_norm),
        # Not known for optimizers that do not work element by element.
        "state_bytes": None if schema is None else _state_bytes(schema, parcels),
        "fixed_bytes": sum(t.numel() * t.element_size() for t in (*replica.untrained.values(), *module.buffers())),
    }


def _state_bytes(schema: StateSchema, parcels: Sequence[Parcel]) -> int:
    scalars = sum(dtype.itemsize for _, dtype in schema.scalars)
    return sum(len(schema.mirrored) * parcel.num_bytes + scalars for parcel in parcels)


def _facts_of_float64(task: Task, train: Any) -> dict[str, Any]:
    """What is known of the loss in float64, in which parts of a batch are compared with the whole."""
    try:
        probe = LossProbe(task, train, "float64")
        return {"random_in_float64": probe.is_random(), "narrows": probe.narrows()}
    except Exception as error:  # it has computed a loss in its own numbers before: these are what it cannot do
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        return {"random_in_float64": False, "why_no_float64": why}


def _sizes(job: Job, task: Task, train: Any, replica: Replica, made_bytes: int) -> JobSizes:
    """Of a job to come."""
    # As its workers will: what follows each other through the model is cut as a task's own micro-batches are.
    task = replace(task, accumulate=task.accumulate * job.conduct.microbatches)
    schedule = make_schedule(task, train, job.num_slots, job.cluster.places, job.conduct.clients)
    test = 0 if task.test is None else len(task.dataset("test"))
    extent = Extent(
        total_steps=schedule.total_steps,
        tables=num_tables(task, schedule),
        table_rows=most_batches(test, held_of(schedule.order), task.batch_size) if test else 0,
        table_columns=Tables.of(task).columns if test else 0,
        accumulate=task.accumulate,
    )
    one = _size_of_pass(job, task, replica, first_microbatch(job, task, train))
    blueprint = Blueprint.drawn(task, job.numerics) or Blueprint.of(replica)
    return size_up(job, blueprint, extent=extent, one=one, data=made_bytes)


def _refusal(job: Job, task: Task, train: Any, replica: Replica) -> str:
    """Why a job to come would not begin; empty where nothing is known against it."""
    try:
        check_task(task, job.conduct, job.strategy)
        try_cut(job.spec, replica, first_microbatch(job, task, train), job.cluster.places)
    except ShoalError as error:
        return str(error)
    except Exception:  # what is wrong with the task is told when it trains
        return ""
    return ""


def _size_of_pass(job: Job, task: Task, replica: Replica, batch: Any) -> PassSize | None:
    """Without values, or by a pass of the real model where the task's code asks for some."""
    found = pass_without_values(
        task, batch, precision=job.precision, recompute=job.recompute, numerics=job.numerics
    )
    if found is not None:
        return found
    try:
        return measure_pass(task, replica.module, batch, job.precision)
    except Exception:  # what is wrong with it is told when it trains
        return None


def private_bytes() -> int:
    """Memory of this process that no other shares."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return 1024 * sum(int(found) for found in re.findall(r"^Private_\w+: +(\d+) kB", text, re.MULTILINE))


def _facts_of_data(task: Task, train: Any, world: Mapping[str, Any]) -> dict[str, Any]:
    schedule = make_schedule(task, train, world.get("slots", 1), world.get("workers", 1))
    is_endless = isinstance(train, ByPosition) and train.length is None
    return {
        "num_samples": schedule.samples_after(schedule.total_steps) if is_endless else len(train),
        "seed": task.seed,
        "batch_size": task.batch_size,
        "batch_per_worker": task.batch_per_worker,
        "accumulate": task.accumulate,
        "global_batch": schedule.batch_size,
        "total_steps": schedule.total_steps,
    }


def _refusals(task: Task, asked: Mapping[str, Any]) -> dict[str, str]:
    """By strategy, of those that are asked about: why it cannot train this task."""
    found = {}
    for written in asked.get("strategies", ()):
        conduct = parse_strategy(written).conduct(Cluster(workers=asked["workers"]))
        try:
            check_task(task, conduct, written)
        except SpecError as refusal:
            found[written] = str(refusal)
    return found


class NarrowedNumbers(TorchDispatchMode):
    """Whether an operation makes narrower numbers of float64: some code casts whatever it gets to float32."""

    are_found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if any(kind.itemsize < torch.float64.itemsize for kind in _kinds_of_floats(made)):
            self.are_found |= torch.float64 in _kinds_of_floats((args, kwargs))
        return made


def _kinds_of_floats(value: Any) -> set[torch.dtype]:
    found = (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return {tensor.dtype for tensor in found if tensor.is_floating_point()}


class LossProbe:
    """Computes the loss of the first batch under different keys of the random numbers."""

    def __init__(self, task: Task, train: Any, numerics: str) -> None:
        order = make_order(task, train, task.batch_size)
        self._seed = task.seed
        self._feed = Feed(task, train, numerics=numerics)
        samples = order.samples(0, 0, min(task.batch_size, order.length))
        self._cut = Cut(0, samples, len(samples))
        self.replica = Replica(task, numerics=numerics, sample=lambda: self._feed.batch(samples[:2]))
        if (weighing := derived_weight(self.replica)) is not None:
            self.replica.task = replace(self.replica.task, weight=weighing.weight)
            self._feed.weigh_by(weighing.weight)

    def why_no_mean(self) -> str:
        """Why the loss is no mean over samples, and what to set; empty where it is one, or nothing can be said."""
        samples = self._cut.samples
        found = seen_in(self.replica, self._feed.keyed_batch(samples, self._seed), len(samples))
        return "; ".join(found or ())

    def loss(self) -> float:
        """The loss of the initial model."""
        return self._loss(self._seed)

    def is_repeatable(self) -> bool:
        """Whether the same key gives the same loss."""
        return self._loss(self._seed) == self._loss(self._seed)

    def is_random(self) -> bool:
        """Whether another key gives another loss: dropout, augmentation."""
        return self._loss(self._seed) != self._loss(self._seed + 1)

    def narrows(self) -> bool:
        """Whether some of it is computed in fewer digits than the model has."""
        batch = self._feed.keyed_batch(self._cut.samples, self._seed)
        with undisturbed(self.replica), NarrowedNumbers() as noted:
            plain_loss(self.replica, batch)
        return noted.are_found

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
