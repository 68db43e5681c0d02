"""Horovod's interface for torch: `import shoal.horovod.torch as hvd`."""

from __future__ import annotations

from shoal.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from shoal.horovod.runtime import (
    ProcessSet,
    add_process_set,
    current,
    global_process_set,
    init,
    is_initialized,
    remove_process_set,
    shutdown,
)
from shoal.horovod.torch import elastic
from shoal.horovod.torch.compression import Compression
from shoal.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from shoal.horovod.torch.mpi_ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from shoal.horovod.torch.optimizer import DistributedOptimizer
from shoal.horovod.torch.sync_batch_norm import SyncBatchNorm


def rank() -> int:
    """This process's number among all."""
    return current().rank


def size() -> int:
    """How many processes there are."""
    return current().world.world_size


def local_rank() -> int:
    """This process's number on its host."""
    return current().world.local_rank


def local_size() -> int:
    """How many processes its host has."""
    return current().world.local_size


def cross_rank() -> int:
    """Of its host, among those that have a process with this one's local rank."""
    return sum(current().hosts_alike()[: current().world.host_number])


def cross_size() -> int:
    """How many hosts have a process with this one's local rank."""
    return sum(current().hosts_alike())


def is_homogeneous() -> bool:
    """Whether all hosts have equally many processes."""
    return len({size for size in current().world.hosts if size}) <= 1


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Keep what happens to tensors from now on; the first rank writes the file when it is stopped."""
    if current().rank == 0:
        current().timeline.start(file_path)


def stop_timeline() -> None:
    """Write the file."""
    current().timeline.stop()


def gloo_enabled() -> bool:
    """Scripts ask this to know that there is no MPI; memory that processes share takes gloo's part."""
    return True


def gloo_built(verbose: bool = False) -> bool:
    """As `gloo_enabled`."""
    return True


def mpi_enabled() -> bool:
    """There is no MPI."""
    return False


def mpi_built(verbose: bool = False) -> bool:
    """There is no MPI."""
    return False


def mpi_threads_supported() -> bool:
    """There is no MPI."""
    return False


def nccl_built(verbose: bool = False) -> int:
    """Tensors of GPUs go through the host's memory."""
    return 0


def cuda_built(verbose: bool = False) -> bool:
    """Nothing was built for it."""
    return False


def rocm_built(verbose: bool = False) -> bool:
    """Nothing was built for it."""
    return False


def ddl_built(verbose: bool = False) -> bool:
    """Nothing was built for it."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Nothing was built for it."""
    return False


__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
