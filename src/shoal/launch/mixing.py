"""`device=cuda+cpu` with steps that all take together: parts by measured speed, or the processor is left out."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.launch.supervisor import run_job
from shoal.layout.device_shares import DeviceTimes, cut_by_devices
from shoal.spec import Cluster, Job
from shoal.spec.vocabulary import Purpose

if TYPE_CHECKING:
    from shoal.launch.owner import ZygoteProcess


def with_measured_shares(job: Job, zygote: ZygoteProcess | None = None) -> tuple[Job, str]:
    """The job with parts as large as each worker's device is fast, or without the processor where it does not pay;
    and a line that says which. What was found is the job's from now on."""
    with tempfile.TemporaryDirectory(prefix="shoal-devices-") as folder:
        trial = Job(
            target=job.target,
            args=job.args,
            purpose=Purpose.TRY,
            cluster=Cluster(workers=1, threads=job.cluster.threads_per_worker, device="cuda"),
            overrides=job.overrides,
            run_dir=folder,
            options={"job": job.to_json(), "devices": True},
        )
        run_job(trial, lambda event: None, zygote)
        page = json.loads((Path(folder) / "form.json").read_text(encoding="utf-8"))
    return job_by_times(job, page["batch"], DeviceTimes(**page["times"]))


def job_by_times(job: Job, batch: int, times: DeviceTimes) -> tuple[Job, str]:
    """The same from what was measured."""
    workers = job.cluster.places
    if times.gpus >= workers:
        return _on_gpus(job, workers), f"cuda+cpu: there are GPUs for all {workers} workers"
    found = cut_by_devices(batch, workers, times)
    if not found.pays:
        return _on_gpus(job, times.gpus), found.text
    cuts = [[1, list(found.sizes)]]
    strategy = str(job.spec.across_devices(mixed=True))
    return replace(job, strategy=strategy, options={**job.options, "cuts": cuts}), found.text


def _on_gpus(job: Job, workers: int) -> Job:
    strategy = str(job.spec.across_devices(mixed=False))
    return replace(
        job, strategy=strategy, slots=None, cluster=replace(job.cluster, device="cuda", workers=workers)
    )
