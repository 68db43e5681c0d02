"""The worker: builds its replica, joins the others, trains, and leaves the model behind."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.checkpoint.freeing import Shelf
from shoal.checkpoint.model_stream import save_stream
from shoal.comm.channel import Channel
from shoal.errors import SpecError
from shoal.ledger.book import CutLog, audit
from shoal.model.optimizer.averaging import average_key, averaged_model
from shoal.observe.happenings import Audited, Saved
from shoal.observe.run_folder import RunFolder
from shoal.roles.callbacks.opening import callbacks_of
from shoal.roles.fast.trying import try_forms
from shoal.roles.inference.prediction import predict
from shoal.roles.inference.saved_model import evaluate
from shoal.roles.inspection import inspect
from shoal.roles.loading.incremental import History
from shoal.roles.loading.start import read_start
from shoal.roles.loading.task import load_task
from shoal.roles.memory.gpu import gpu_memory_explained
from shoal.roles.memory.limit import check_fits, limit_memory, make_parking, memory_explained
from shoal.roles.process.beat import Beat
from shoal.roles.process.devices import choose_device
from shoal.roles.process.reporter import Reporter
from shoal.roles.process.timeline import Timeline
from shoal.roles.process.told_warnings import warnings_told
from shoal.roles.training.best import BestKeeper
from shoal.roles.training.chaos import Sabotage
from shoal.roles.training.checkpointing import Checkpointing, check_position, lacks_model
from shoal.roles.training.hosting import PlacesMoved
from shoal.roles.training.loop import Loop
from shoal.roles.training.mean_check import Generators, MeanCheck
from shoal.roles.training.observer import Outcome
from shoal.roles.training.training import Training
from shoal.spec import Job, Task, World
from shoal.spec.vocabulary import Purpose, Role, State
from shoal.strategies import make_strategy
from shoal.strategies.base import Company, Setting


def run_worker(job: Job, world: World, channel: Channel) -> int:
    """What a `worker` or `spare` process does from its first to its last line."""
    # What is freed in every step must not stay in the process.
    limit_memory(job.cluster.memory_bytes, is_frugal=job.conduct.frees_parameters)
    if job.sync_device:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # before anything is asked of a GPU
    world = replace(world, device=choose_device(job.cluster.device, world.local_rank))
    path = job.options.get("timeline")
    is_quiet = bool(job.options.get("quiet"))
    reporter = Reporter(
        world,
        channel,
        timeline=Timeline(path) if path else None,
        sabotage=Sabotage.of(job),
        is_quiet=is_quiet,
    )
    tells = world.is_first and not is_quiet  # all have the same to say
    with (
        nullcontext() if is_quiet else Beat(channel, reporter.pulse),
        memory_explained(job),
        warnings_told(reporter.warn) if tells else nullcontext(),
    ):
        _PURPOSES[job.purpose](job, world, reporter)
    return 0


def _train(job: Job, world: World, reporter: Reporter) -> None:
    if job.conduct.is_measured_first:
        raise SpecError(
            f"Job: strategy={job.strategy} with device={job.cluster.device} is measured before its run; start it "
            "with shoal train, or shoal.train."
        )
    reporter.on_state(State.STARTING, 0)
    strategy = make_strategy(job.spec, world, job.num_slots, replaceable=job.cluster.spares > 0)
    task = _task_of(job)
    check_fits(job, task)
    training = Training(
        task,
        strategy,
        world,
        job.conduct,
        numerics=job.numerics,
        start=read_start(job),
        parking=make_parking(job),
        precision=job.precision,
        recompute=job.recompute,
        form=job.form,
        privacy=job.protection,
        warn=reporter.warn,
    )
    training.replica.preparing = lambda: reporter.pulse.interlude(State.PREPARING)
    check_position(training.replica.start, training.schedule, task.seed, may_be_over=lacks_model(job))
    if training.weighing is not None and world.is_first:
        reporter.line(training.weighing.text)
    if training.protection is not None and world.is_first:
        reporter.line(training.protection.budget.told())
    training.checkpoints = Checkpointing(job, training.replica, training.schedule, reporter)
    training.callbacks = training.checkpoints.callbacks = callbacks_of(job, training, reporter)
    if task.best_by is not None and job.run_dir:
        training.best = BestKeeper(training, RunFolder(Path(job.run_dir)), reporter)
    if training.evaluator is not None:
        training.evaluator.meet = reporter.meet
    _open_ledger(job, training)
    _check_mean(job, training, reporter)
    setting = make_setting(job, training, reporter)
    with gpu_memory_explained(job, training.replica):
        strategy.open(training.replica, setting)
    loop = Loop(training, setting, reporter)
    committed = 0
    if world.role == Role.SPARE:
        training.world = reporter.wait_for_places(
            world, prepare=lambda: training.warm_up(range(1)), follow=loop.follow
        )
        committed = loop.join()
        reporter.confirm_places(training.world)
    else:
        reporter.on_state(State.READY, 0)
        _tell_first_cut(training, reporter)
    reporter.total_steps = training.schedule.total_steps
    reporter.on_state(State.TRAINING, committed)
    training.sabotage = reporter.sabotage
    try:
        with gpu_memory_explained(job, training.replica):
            outcome = loop.run(committed)
    except Exception as error:
        reporter.send(training.witness.testify(error))
        raise
    if outcome.reason != "released":
        loop.gather()
    training.close()
    training.checkpoints.close()
    if outcome.reason != "released":
        audited = _audited(training, outcome, reporter)
        _end_together(job, loop, training, reporter, lambda: _finish(job, training, outcome, reporter, audited))
    strategy.close()


def _end_together(
    job: Job, loop: Loop, training: Training, reporter: Reporter, finish: Callable[[], None]
) -> None:
    """Tell how it went. Where hosts may be lost, nobody leaves before the first worker has saved the model: others
    may need what one has to come to the end, or become the first themselves."""
    # A state of which each has a part is saved by all together.
    is_everybodys = bool(job.options.get("state")) and not training.conduct.has_one_state
    if is_everybodys or not (training.conduct.outlives_hosts and training.world.is_spread):
        finish()
        return
    is_told = False
    while True:
        if training.world.is_first and not is_told:
            finish()
            is_told = True
        try:
            reporter.part()
            break
        except PlacesMoved:
            loop.heed(reporter.take_orders(at_border=False))
    if not is_told:
        finish()


def _task_of(job: Job) -> Task:
    """The job's task, less what is not wanted in trials and measurements."""
    task, options = load_task(job), job.options
    if not options.get("evaluate", True):
        task = replace(task, test=None, stop=None, keep_best=None, callbacks=())
    if options.get("quiet") or not options.get("callbacks", True):
        task = replace(task, callbacks=())
    # What follows each other through the model is cut as a task's own micro-batches are.
    return replace(task, accumulate=task.accumulate * job.conduct.microbatches)


def _open_ledger(job: Job, training: Training) -> None:
    """Keep a book of what is committed, and cut batches as an earlier run did where this one repeats it."""
    if job.options.get("quiet") or job.conduct.leaves_out_the_late:
        training.book = None
    if training.checkpoints is not None:
        training.checkpoints.book = training.book
        training.checkpoints.protection = training.protection
    if (cuts := job.options.get("cuts")) is not None:
        training.recorded_cuts = CutLog.from_plain(cuts)


def _check_mean(job: Job, training: Training, reporter: Reporter) -> None:
    """Where batches are cut, let one worker see whether that changes what is trained."""
    parts = training.slots * training.task.accumulate
    if training.protection is not None:  # each sample is computed by itself, however a batch is cut
        return
    if not training.world.is_first or parts == 1 or job.options.get("quiet"):
        return
    check = MeanCheck(training.replica, parts, reporter.warn)
    if not training.conduct.gathers:
        training.mean_check = check
    elif job.cluster.memory_bytes is None:  # the model is still whole here, and in memory
        generators = Generators(training.replica.device)
        check.look(training.sample(), training.sample_size)
        generators.restore()


def _tell_first_cut(training: Training, reporter: Reporter) -> None:
    """A resumed run may go on with other cuts than those that the attempt before it has told of."""
    start, book = training.replica.start, training.book
    if start.step and training.world.is_first and book is not None and len(book.cuts):
        reporter.on_cuts(start.step + 1, training.sizes(start.step + 1))


def _audited(training: Training, outcome: Outcome, reporter: Reporter) -> dict[str, Any]:
    """What became of every sample, told by the first worker; where there are servers, the coordinator counts."""
    if training.book is None or training.conduct.servers:
        return {}
    with reporter.pulse.during(State.AUDITING):
        found = audit(training.book, training.schedule, outcome.step)
    if training.world.is_first:
        reporter.send(Audited(**found))
    return {"audit": found}


def make_setting(job: Job, training: Training, reporter: Reporter) -> Setting:
    """The company this worker finds."""
    callbacks = training.callbacks

    def wants_stop() -> bool:
        assert callbacks is not None
        return reporter.wants_stop() or callbacks.wants_stop

    return Setting(
        world=training.world,
        conduct=job.conduct,
        extent=training.extent,
        company=Company(
            report=reporter.line,
            warn=reporter.warn,
            on_idle=reporter.on_idle,
            on_block=reporter.pulse.block,
            on_cuts=reporter.on_cuts,
            wants_stop=reporter.wants_stop if callbacks is None else wants_stop,
            meet=reporter.meet,
            moved_coordinator=lambda: reporter.coordinator,
            is_held=lambda: reporter.is_held,
            page=callbacks.marks.page if callbacks is not None and training.world.is_spread else None,
        ),
        supply=training,
        clip_norm=training.task.clip_norm,
        port=job.cluster.port,
        memory_bytes=job.cluster.memory_bytes,
        protection=training.client_protection,
    )


def _finish(
    job: Job, training: Training, outcome: Outcome, reporter: Reporter, audited: Mapping[str, Any]
) -> None:
    """Save the model (the first worker) and tell how it went: what it has said to be done, nobody does again."""
    reporter.flush()
    reporter.pulse.enter(State.SAVING)
    results: dict[str, Any] = {
        "steps": outcome.step,
        "samples": training.schedule.samples_after(outcome.step),
        "reason": outcome.reason,
        "results": outcome.results,
        **training.replica.precision.facts(),
        **outcome.facts,
        **audited,
    }
    if training.protection is not None and training.world.is_first:
        results |= training.protection.facts(outcome.step)
    if not math.isnan(outcome.loss):
        results["loss"] = outcome.loss
    if num_skipped := History(job).num_skipped:
        results["skipped_seen"] = num_skipped
    if training.world.is_first or training.conduct.gathers:
        results |= _save(job, training, outcome, reporter)
    if training.best is not None and training.world.is_first:
        results |= training.best.facts()
    if training.callbacks is not None:
        training.callbacks.end(outcome.reason)
        reporter.flush()
    if training.checkpoints is not None and (due := training.checkpoints.due):
        results["due_checkpoints"] = due
    reporter.done(results)


def _save(job: Job, training: Training, outcome: Outcome, reporter: Reporter) -> dict[str, Any]:
    """The first worker writes the model, and the optimizer's state where it is asked for; the digests of both.
    Where the model is cut, all others give what they hold."""
    is_first, digests = training.world.is_first, dict[str, Any]()
    if training.best is not None and training.best.is_restored:
        if is_first:
            best = training.best.restore()
            digests = {"digest": best.digest, "results": dict(best.results)}
            reporter.send(Saved(path=str(RunFolder(Path(job.run_dir)).model), digest=best.digest))
    elif job.run_dir:
        stream = training.strategy.model_stream(training.replica)
        if is_first:
            reporter.on_state(State.SAVING, outcome.step)
            folder = RunFolder(Path(job.run_dir))
            shelf = Shelf(folder.checkpoints, reporter.warn)
            digests["digest"] = save_stream(folder.model, stream, shelf=shelf, steps=str(outcome.step))
            reporter.send(Saved(path=str(folder.model), digest=digests["digest"]))
        else:
            stream.drain()
    digests |= _save_average(job, training, outcome)
    if job.options.get("state"):
        stream = training.strategy.state_stream()
        if is_first:
            digests["state_digest"] = save_stream(Path(job.options["state"]), stream)
        else:
            stream.drain()
    return digests


def _save_average(job: Job, training: Training, outcome: Outcome) -> dict[str, Any]:
    """Likewise the model with the average of its parameters, where the optimizer keeps one."""
    key = average_key(training.replica.optimizer)
    if key is None or not job.run_dir or not training.conduct.has_one_state:
        return {}
    state, model = training.strategy.state_stream(), training.strategy.model_stream(training.replica)
    if not training.world.is_first:
        state.drain()
        model.drain()
        return {}
    path = RunFolder(Path(job.run_dir)).average_model
    return {"average_digest": save_stream(path, averaged_model(model, state, key), steps=str(outcome.step))}


_PURPOSES = {
    Purpose.TRAIN: _train,
    Purpose.EVALUATE: evaluate,
    Purpose.PREDICT: predict,
    Purpose.INSPECT: inspect,
    Purpose.TRY: try_forms,
}
