"""A worker that may use only so much memory: it is refused more, and says what would do."""

import ctypes
import mmap
import resource

import pytest
import torch

from helpers.forked import in_processes
from shoal.arena import Segment
from shoal.errors import OutOfMemory
from shoal.roles.loading.task import load_task
from shoal.roles.memory.limit import check_fits, limit_memory, memory_explained
from shoal.roles.memory.sizing import PROCESS_BYTES
from shoal.roles.process.failure import is_memory_error
from shoal.spec import Cluster, Job

MIB = 1 << 20
TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import shoal

def task():
    return shoal.Task(
        model=lambda: nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8))),
        loss=F.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(torch.zeros(4, 512), torch.zeros(4, 512)),
        batch_size=4,
        max_steps=1,
    )
"""


def allocate(num_bytes):
    return torch.zeros(num_bytes, dtype=torch.uint8)


def test_more_than_the_limit_is_refused():
    def work(world):
        limit_memory(64 * MIB)
        # A mapping is new memory in any case; the others may find some that this process has freed.
        kept = mmap.mmap(-1, 40 * MIB)
        refused = []
        for ask in (lambda: mmap.mmap(-1, 40 * MIB), lambda: allocate(1024 * MIB), lambda: bytearray(1024 * MIB)):
            try:
                ask()
            except Exception as error:
                refused.append(is_memory_error(error))
        kept.close()
        mmap.mmap(-1, 40 * MIB).close()  # what was freed can be used again
        return refused

    assert in_processes(1, work) == [[True, True, True]]


def test_what_was_too_little_is_explained(tmp_path):
    path = tmp_path / "explained.py"
    path.write_text(TASK)
    job = Job(target=f"{path}:task", cluster=Cluster(workers=2, memory="48MiB"))

    def work(world):
        # What earlier tests of this process have freed would do without asking for more.
        ctypes.CDLL(None).malloc_trim(0)
        limit_memory(job.cluster.memory_bytes)
        try:
            with memory_explained(job):
                allocate(100 * MIB)
        except OutOfMemory as error:
            return str(error), allocate(100 * MIB).numel()  # nothing is limited any more
        return None

    (told, size), *_ = in_processes(1, work)
    assert size == 100 * MIB
    assert "48.0 MiB" in told and "strategy=data and 2 workers" in told
    # Half of the model, and what it takes to see what a layer costs.
    needed = 4 + (16 + 1) + PROCESS_BYTES / MIB
    assert "sharded with " in told and f"pipeline with 2 workers needs {needed:.1f} MiB each" in told


def test_a_sentence_made_of_a_refusal_is_explained_too(tmp_path):
    path = tmp_path / "shared.py"
    path.write_text(TASK)
    job = Job(target=f"{path}:task", cluster=Cluster(workers=2, memory="40MiB"))

    def work(world):
        limit_memory(job.cluster.memory_bytes)
        segment = Segment(None)
        segment.reserve("values", 100 * MIB)
        try:
            with memory_explained(job):
                segment.map()
        except OutOfMemory as error:
            return str(error)

    (told,) = in_processes(1, work)
    assert "40.0 MiB" in told and "too little for strategy=data" in told


@pytest.mark.parametrize(
    "strategy",
    [
        *("data", "data:via=ring", "ps", "ps:sync=asp", "sharded", "tensor", "pipeline", "mesh:shard=2"),
        *("layer:place=0@0+4@1", "layer:decoupled=on", "layer:phases=2"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_made(tmp_path, strategy):
    path = tmp_path / "refused.py"
    path.write_text(TASK)
    job = Job(target=f"{path}:task", strategy=strategy, cluster=Cluster(workers=2, memory="14MiB"))

    def work(world):
        task = load_task(job)
        limit_memory(job.cluster.memory_bytes)
        try:
            check_fits(job, task)
        except OutOfMemory as error:
            return str(error)

    (told,) = in_processes(1, work)
    assert f"memory allows each worker 14.0 MiB, but with strategy={strategy} and 2 workers one needs" in told


def test_what_is_mapped_and_not_used_is_allowed_on_top(tmp_path):
    path = tmp_path / "served.py"
    path.write_text(TASK)
    job = Job(target=f"{path}:task", strategy="ps:sync=asp", cluster=Cluster(workers=2, memory="200MiB"))

    def work(world):
        task = load_task(job)
        limit_memory(job.cluster.memory_bytes)
        before, _ = resource.getrlimit(resource.RLIMIT_AS)
        check_fits(job, task)
        after, _ = resource.getrlimit(resource.RLIMIT_AS)
        return after - before

    (added,) = in_processes(1, work)
    # Of ten ranks with six buffers two use two each; of two places, and two that are marked, one each is used; and
    # there are journals for the second place.
    copies = (10 * 6 - 4 + 2) * 8 * MIB
    assert copies <= added <= copies + 32 * MIB


def test_other_errors_and_other_jobs_are_left_alone():
    for cluster, error in ((Cluster(memory="1GiB"), KeyError("x")), (Cluster(), MemoryError("no limit was set"))):
        with pytest.raises(type(error)), memory_explained(Job(target="none.py", cluster=cluster)):
            raise error
