"""`fast`: which form of a step a job takes, tried in a process of its own before the run."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.launch.supervisor import run_job
from shoal.spec import Cluster, Job
from shoal.spec.vocabulary import Purpose

if TYPE_CHECKING:
    from shoal.launch.owner import ZygoteProcess


def in_fastest_form(job: Job, zygote: ZygoteProcess | None = None) -> tuple[Job, str]:
    """The job in the form that was the fastest, which it names from now on, and a line that says what was tried.

    It is tried on this host, in one process with as many threads as a worker has.
    """
    device = "cpu" if job.cluster.device == "cpu" else "cuda"
    with tempfile.TemporaryDirectory(prefix="shoal-fast-") as folder:
        trial = Job(
            target=job.target,
            args=job.args,
            purpose=Purpose.TRY,
            cluster=Cluster(workers=1, threads=job.cluster.threads_per_worker, device=device),
            overrides=job.overrides,
            run_dir=folder,
            options={"job": job.to_json()},
        )
        run_job(trial, lambda event: None, zygote)
        found = json.loads((Path(folder) / "form.json").read_text(encoding="utf-8"))
    chosen = replace(
        job,
        **{**found["form"], "offload": job.offload},  # which is for memory, and not for speed
        precision=found["precision"],
        fast=False,
        options={**job.options, "chosen_form": {"text": found["text"], "ratio": found["ratio"]}},
    )
    return chosen, str(found["text"])
