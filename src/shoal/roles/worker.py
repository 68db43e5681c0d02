"""The worker: builds its replica, joins the others, trains, and leaves the model behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoal.arena import keep_freed_memory
from shoal.checkpoint import save_tensors
from shoal.comm.channel import Channel
from shoal.errors import SpecError
from shoal.roles.beat import Beat
from shoal.roles.inference import evaluate, predict
from shoal.roles.inspection import inspect
from shoal.roles.loading import load_task
from shoal.roles.reporter import Reporter
from shoal.roles.served import ServedTraining
from shoal.roles.training import Outcome, Training
from shoal.spec import Data, Job, ParameterServer, World
from shoal.strategies import make_strategy
from shoal.strategies.base import Setting


def run_worker(job: Job, world: World, channel: Channel) -> int:
    """What a `worker` or `spare` process does from its first to its last line."""
    keep_freed_memory()
    world = replace(world, device=choose_device(job.cluster.device, world.local_rank))
    reporter = Reporter(world, channel)
    with Beat(channel, lambda: reporter.step):
        _PURPOSES[job.purpose](job, world, reporter)
    return 0


def _train(job: Job, world: World, reporter: Reporter) -> None:
    reporter.on_state("starting", 0)
    if isinstance(job.spec, ParameterServer):
        _train_served(job, world, reporter)
        return
    strategy = make_strategy(job.spec, world, job.num_slots, replaceable=job.cluster.spares > 0)
    task = load_task(job)
    if not job.options.get("evaluate", True):
        task = replace(task, test=None, stop=None)
    training = Training(task, strategy, world, job.num_slots, numerics=job.numerics)
    setting = make_setting(job, training, reporter)
    committed = 0
    if world.role == "spare":
        strategy.open(training.replica, setting)
        training.warm_up(range(1))
        reporter.on_state("ready", 0)
        world = reporter.wait_for_place(world)
        training.world = world
        setting = replace(setting, world=world)
        committed = strategy.reform(world)
    else:
        strategy.open(training.replica, setting)
        reporter.on_state("ready", 0)
    reporter.total_steps = training.schedule.total_steps
    reporter.on_state("training", committed)
    outcome = training.run(setting, reporter, committed)
    _finish(job, training, outcome, reporter, strategy.snapshot)
    strategy.close()


def _train_served(job: Job, world: World, reporter: Reporter) -> None:
    served = ServedTraining(job, world, reporter)
    reporter.on_state("ready", 0)
    reporter.total_steps = served.training.schedule.total_steps
    reporter.on_state("training", 0)
    outcome = served.run()
    _finish(job, served.training, outcome, reporter, served.client.puller.snapshot, served.facts())
    served.close()


def choose_device(kind: str, local_rank: int) -> str:
    """This worker's device. Asked here and never in the zygote, whose children could then not use GPUs."""
    if kind == "cpu":
        return kind
    if not torch.cuda.is_available():
        raise SpecError(f"Cluster: device={kind} was asked for, but torch finds no GPU here; use device=cpu.")
    device = f"cuda:{local_rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return device


def make_setting(job: Job, training: Training, reporter: Reporter) -> Setting:
    """The company this worker finds."""
    spec = job.spec
    assert isinstance(spec, Data)
    return Setting(
        world=training.world,
        slots=job.num_slots,
        slots_per_worker=tuple(spec.slots_per_worker(job.num_slots, job.cluster.workers)),
        extent=training.extent,
        clip_norm=training.task.clip_norm,
        report=reporter.line,
        port=job.cluster.port,
    )


def _finish(
    job: Job,
    training: Training,
    outcome: Outcome,
    reporter: Reporter,
    snapshot: Callable[[], dict[str, torch.Tensor]],
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Save the model (the first worker) and tell how it went."""
    reporter.flush()
    results: dict[str, Any] = {
        "steps": outcome.step,
        "samples": training.schedule.samples_after(outcome.step),
        "loss": outcome.loss,
        "reason": outcome.reason,
        "results": outcome.results,
        **(facts or {}),
    }
    if training.world.is_first:
        training.strategy.settle()
        state = training.replica.module.state_dict()
        if job.run_dir:
            reporter.on_state("saving", outcome.step)
            path = Path(job.run_dir) / "model.safetensors"
            results["digest"] = save_tensors(path, state, steps=str(outcome.step))
            reporter.send({"kind": "saved", "path": str(path), "digest": results["digest"]})
        if job.options.get("timeline"):
            Path(job.options["timeline"]).write_text(json.dumps(list(reporter.timeline)))
        if job.options.get("state"):
            results["state_digest"] = save_tensors(Path(job.options["state"]), snapshot())
    reporter.done(results)


_PURPOSES = {"train": _train, "evaluate": evaluate, "predict": predict, "inspect": inspect}
