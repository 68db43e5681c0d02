"""Repeat a finished run in one process and compare what it left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import SpecError
from shoal.observe import RunFolder
from shoal.observe.jsonl import read_events
from shoal.spec import Data, Job
from shoal.verify.bounds import same_slots_bound
from shoal.verify.judging import Comparison, judge
from shoal.verify.report import BITWISE, Report, Row, Verdict
from shoal.verify.strategy import alone
from shoal.verify.trials import Facts, Progress, Trial, open_laboratory

if TYPE_CHECKING:
    from shoal.launch.owner import ZygoteProcess

_NUM_TRIALS = 2


def replay_run(
    run: str | Path,
    *,
    runs: str | Path = "runs",
    zygote: ZygoteProcess | None = None,
    progress: Progress | None = None,
) -> Report:
    """Train again, in one process, as a finished run was trained, for as many steps.

    `run` is the run's folder or its name under `runs`. Its code and data must still be where they were.
    """
    folder = RunFolder.open(run, runs)
    result = folder.read_result()
    job = _recorded_job(folder, result)
    with open_laboratory(_NUM_TRIALS, zygote, progress) as laboratory:
        facts, _ = laboratory.inspect(job)
        again, bound = _in_one_process(job, facts)
        trial = laboratory.train(f"{folder.name} again in one process", again)
        row = _judge(folder, result, trial, bound)
    return Report(
        target=job.target,
        strategy=job.strategy,
        workers=job.cluster.workers,
        slots=job.num_slots,
        steps=trial.steps,
        rows=(row,),
    )


def _recorded_job(folder: RunFolder, result: dict[str, Any]) -> Job:
    job = folder.read_job()
    if job.purpose != "train" or not result.get("digest") or not result.get("steps"):
        raise SpecError(
            f"Run {folder.name!r} left no trained model to compare with (it was made to {job.purpose}, and "
            f"took {result.get('steps', 0)} steps); name a run that trained and saved."
        )
    threads = next((e.values["threads"] for e in read_events(folder.path) if e.kind == "world"), None)
    return replace(
        job,
        cluster=replace(job.cluster, threads=threads or job.cluster.threads_per_worker),
        overrides={**job.overrides, "max_steps": result["steps"]},
    )


def _in_one_process(job: Job, facts: Facts) -> tuple[Job, float]:
    """What to run to get the same model, and how far from the run's it may be."""
    if job.cluster.workers == 1:
        return replace(job, cluster=replace(job.cluster, spares=0)), BITWISE
    spec = job.spec
    assert isinstance(spec, Data)
    synchronised = spec.batchnorm == "sync" and facts.has_batchnorm
    bound = same_slots_bound(spec, facts.optimizer, job.overrides["max_steps"], whole_batch=synchronised)
    return alone(job, facts, slots=None if synchronised else job.num_slots), bound


def _judge(folder: RunFolder, result: dict[str, Any], trial: Trial, bound: float) -> Row:
    title = f"{folder.name} again in one process"
    if bound == BITWISE:
        same = trial.digest == result["digest"]
        return Row(
            comparison=title,
            what="the model's digest",
            bound=BITWISE,
            verdict=Verdict.EQUAL if same else Verdict.MISMATCH,
            note=trial.digest if same else f"{trial.digest}, but the run recorded {result['digest']}",
        )
    from shoal.checkpoint import load_tensors
    from shoal.verify.difference import difference

    found = difference(load_tensors(folder.model), trial.model(), lambda name: name.rpartition(".")[2])
    return judge(Comparison(title=title, bound=bound), "parameters and buffers", found)
