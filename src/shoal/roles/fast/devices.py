"""How fast a job's steps are on a GPU and on the processor beside it, measured on its own task."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import torch

from shoal.errors import SpecError
from shoal.layout.device_shares import DeviceTimes
from shoal.layout.devices import read_architectures, usable
from shoal.model.start import Start
from shoal.roles.fast.choice import StepWay
from shoal.roles.fast.trial import FormTrial
from shoal.roles.process.devices import seen_by_torch
from shoal.spec import Job, Task

_FEW, _MORE = 2, 6
"""Steps on the processor; more where they are short."""
_SHORT_S = 0.2


def measure_devices(task: Task, job: Job, device: str, start: Start) -> dict[str, Any]:
    """The page that says so. `task`: with the whole batch."""
    gpus = min(len(usable(seen_by_torch(), read_architectures(torch.cuda.get_arch_list()))[0]), job.cluster.places)
    batch, others = task.batch_size, job.cluster.places - gpus
    if others and batch < job.cluster.places:
        raise SpecError(
            f"Job: a batch of {batch} samples has none for some of {job.cluster.places} workers; use fewer "
            "workers, or a larger batch_size."
        )
    way = StepWay(form=job.form, precision=job.precision)
    whole_s, sum_s = _on_gpu(task, way, device, start, job.cluster.places)
    half_s, _ = _on_gpu(replace(task, batch_size=max(1, batch // 2)), way, device, start, 1)
    few = min(2, batch)  # one alone has no spread that a BatchNorm could divide by
    sample_s = _on_processor(replace(task, batch_size=few), way, start) / few if others else 1.0
    if others and sample_s < whole_s:  # else there is no hope, and many samples would take long
        some = max(few, batch // (2 * job.cluster.places))
        sample_s = _on_processor(replace(task, batch_size=some), way, start) / some
    return asdict(DeviceTimes(gpus=gpus, whole_s=whole_s, half_s=half_s, sample_s=sample_s, sum_s=sum_s))


def _on_gpu(task: Task, way: StepWay, device: str, start: Start, workers: int) -> tuple[float, float]:
    """Seconds of a step, and of summing its gradients."""
    trial = FormTrial(task, way, device, start)
    try:
        trial.begin()
        return trial.measure(0.5), _summing_s(trial, workers)
    finally:
        trial.close()
        del trial
        gc.collect()
        torch.cuda.empty_cache()


def _summing_s(trial: FormTrial, workers: int) -> float:
    """Gradients to the host, those of the other workers added to them, and back."""
    count = sum(param.numel() for param in trial.training.replica.trained.values())
    at_gpu = torch.zeros(count, device=trial.training.replica.device)
    here, others = torch.zeros(count, pin_memory=True), torch.zeros(count)
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        here.copy_(at_gpu)
        for _ in range(workers - 1):
            here.add_(others)
        at_gpu.copy_(here)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return median(times)


def _on_processor(task: Task, way: StepWay, start: Start) -> float:
    """Seconds of a step, as plain as it is there."""
    trial = FormTrial(task, replace(way, form=replace(way.form, compile=False)), "cpu", start)
    try:
        times: list[float] = []
        while len(times) < _FEW or (len(times) < _MORE and times[-1] < _SHORT_S):
            begun = time.perf_counter()
            trial.take().result()
            times.append(time.perf_counter() - begun)
        return median(times[1:])
    finally:
        trial.close()
