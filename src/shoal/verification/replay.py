"""Repeat a finished run, in one process where that gives the same bits, and compare what it left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import SpecError
from shoal.ledger.book import CutLog
from shoal.observe import RunFolder
from shoal.observe.happenings import WorldFormed
from shoal.observe.jsonl import read_events
from shoal.observe.trust import trusted_job
from shoal.spec import Claim, Job
from shoal.spec.vocabulary import Purpose
from shoal.verification.jobs import alone
from shoal.verification.report import BITWISE, Row, Verdict, VerifyReport
from shoal.verification.trials import Facts, Progress, Trial, open_laboratory, told_cuts

if TYPE_CHECKING:
    from shoal.launch.owner import ZygoteProcess

_NUM_TRIALS = 2


def replay_run(
    run: str | Path,
    *,
    runs: str | Path = "runs",
    trust: bool = False,
    zygote: ZygoteProcess | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Train again as a finished run was trained, for as many steps; the same bits must come out.

    `run` is the run's folder or its name under `runs`. Its code and data must still be where they were; code
    that others could have written is refused unless you `trust` it.
    """
    folder = RunFolder.open(run, runs)
    result = folder.read_result()
    job = _recorded_job(folder, result, trust=trust)
    with open_laboratory(_NUM_TRIALS, zygote, progress) as laboratory:
        facts, _ = laboratory.inspect(job)
        again, title = _again(job, facts, told_cuts(read_events(folder.path)))
        trial = laboratory.train(f"{folder.name} again: {title}", again)
        row = _judge(result, trial, title)
    return VerifyReport(
        target=job.target,
        strategy=job.strategy,
        workers=job.cluster.places,
        slots=job.num_slots,
        steps=trial.steps,
        rows=(row,),
        replayed=folder.name,
    )


def _recorded_job(folder: RunFolder, result: dict[str, Any], *, trust: bool) -> Job:
    job = trusted_job(folder, trust=trust)
    if job.purpose != Purpose.TRAIN or not result.get("digest") or not result.get("steps"):
        raise SpecError(
            f"Run {folder.name!r} left no trained model to compare with (it was made to {job.purpose}, and "
            f"took {result.get('steps', 0)} steps); name a run that trained and saved."
        )
    threads = next((e.what.threads for e in read_events(folder.path) if isinstance(e.what, WorldFormed)), None)
    return replace(
        job,
        cluster=replace(job.cluster, threads=threads or job.cluster.threads_per_worker),
        overrides={**job.overrides, "max_steps": result["steps"]},
        chaos="",  # Whatever befell the run, a calm one must give the same bits.
    )


def _again(job: Job, facts: Facts, cuts: CutLog) -> tuple[Job, str]:
    """What to run to get the same bits, and what to call it."""
    spec, workers = job.spec, job.cluster.places
    claim = spec.claim(workers, facts.optimizer)
    if claim is Claim.RESULT:
        raise SpecError(
            f"verify --replay: with {spec} timing decided what came out, so no run comes out twice; compare its "
            f"results over seeds: shoal verify {job.target} --workers {workers} --strategy {spec}."
        )
    synchronised = facts.has_batchnorm and getattr(spec, "batchnorm", "local") == "sync"
    if (workers > 1 or cuts) and claim is Claim.BITS and not synchronised:
        title = "one process, the same slots" + ", cut as they were" * bool(cuts)
        return alone(job, facts, slots=job.num_slots, cuts=cuts), title
    # Another order of sums would give other bits: these are repeated by as many processes as there were.
    again = replace(job, cluster=replace(job.cluster, spares=0, port=None))
    return again, "one process" if workers == 1 else f"{workers} workers as before"


def _judge(result: dict[str, Any], trial: Trial, title: str) -> Row:
    same = trial.digest == result["digest"]
    return Row(
        comparison=title,
        what="the model's digest",
        bound=BITWISE,
        verdict=Verdict.EQUAL if same else Verdict.MISMATCH,
        note="" if same else f"found {trial.digest}, but the run recorded {result['digest']}",
    )
