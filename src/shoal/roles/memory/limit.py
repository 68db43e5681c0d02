"""The most memory that a worker may use, where the user has set it: kept, and explained where it is too little."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shoal.arena import keep_freed_memory, return_freed_memory, use_small_stacks
from shoal.errors import OutOfMemory
from shoal.layout.memory_need import advice, refusal
from shoal.layout.placement_table import binary_size
from shoal.model.blueprint import Blueprint
from shoal.model.parking.building import Parking
from shoal.roles.loading.task import load_task
from shoal.roles.memory.sizing import address_space_bytes, size_of_pass, size_up
from shoal.roles.process.failure import is_memory_error
from shoal.spec import Job, Task


def limit_memory(limit: int | None, *, is_frugal: bool = False) -> None:
    """Let this process use so many bytes of address space beyond those it has; None: all it can get. `is_frugal`:
    it gives back what it frees in any case."""
    if limit is None and not is_frugal:
        keep_freed_memory()
        return
    return_freed_memory()
    if limit is None:
        return
    use_small_stacks()
    # What an operation needs once, whatever its size, such as libraries and tables of kernels, is not the model's.
    torch.ones(8, 8).requires_grad_().matmul(torch.ones(8, 8)).sum().backward()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes() + limit, hard))


def check_fits(job: Job, task: Task) -> None:
    """Refuse a model that cannot fit, before anything of it is made. What will be mapped and not touched, as room
    for what follows a death is, is allowed on top of the limit."""
    limit, (soft, hard) = job.cluster.memory_bytes, resource.getrlimit(resource.RLIMIT_AS)
    if limit is None or soft == resource.RLIM_INFINITY:
        return
    used = max(0, address_space_bytes() - (soft - limit))
    if (blueprint := Blueprint.drawn(task, job.numerics)) is None:
        return
    sizes = size_up(job, blueprint, one=size_of_pass(job, task), data=used)
    footprint = sizes.footprint
    if text := refusal(job.spec, footprint, sizes.model, sizes.run, limit):
        raise OutOfMemory(text)
    resource.setrlimit(resource.RLIMIT_AS, (soft + footprint.unused_bytes, hard))


def make_parking(job: Job) -> Parking | None:
    """Where a model waits that is to be cut, for workers that may not hold it whole."""
    if job.cluster.memory_bytes is None or not job.conduct.is_never_whole:
        return None
    return Parking(Path(job.run_dir or tempfile.gettempdir()))


@contextmanager
def memory_explained(job: Job) -> Iterator[None]:
    """Where the limit was too little for what is done here, say what would be enough."""
    try:
        yield
    except Exception as error:
        limit = job.cluster.memory_bytes
        # A sentence of ours may have been made of what the system said.
        if limit is None or not any(is_memory_error(each) for each in (error, error.__context__) if each):
            raise
        _lift_limit()
        raise OutOfMemory(_explanation(job, limit)) from error


def _explanation(job: Job, limit: int) -> str:
    blueprint = Blueprint.drawn(load_task(job), job.numerics)
    workers = job.cluster.places
    told = (
        f"Cluster: memory allows each worker {binary_size(limit)}, which was too little for strategy={job.spec} "
        f"and {workers} worker{'s' * (workers > 1)}, with activations and data"
    )
    if blueprint is None:
        return f"{told}; allow more, or use sharded or pipeline with more workers."
    # So many of those that cut the model have just been too few.
    least = workers + 1 if job.conduct.is_never_whole else workers
    sizes = size_up(job, blueprint)
    return f"{told}; without these, {advice(sizes.model, sizes.run, limit, least)}."


def _lift_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
