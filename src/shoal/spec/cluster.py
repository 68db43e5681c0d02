"""`Cluster`: where a job runs."""

from __future__ import annotations

import os
from dataclasses import dataclass

from shoal.errors import SpecError
from shoal.spec.checks import require_choice, require_count

ENGINES = ("local",)
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where a job runs: how many processes, on what."""

    workers: int = 1
    """Processes that train."""
    spares: int = 0
    """Processes that wait, warm, to take the place of a worker that dies."""
    on: str = "local"
    """The engine that starts processes."""
    threads: int | None = None
    """Threads of each process; default its share of the machine's cores."""
    device: str = "cpu"
    """`cpu`, or `cuda`: each worker takes one of the machine's GPUs."""
    port: int | None = None
    """A fixed port for the workers' sockets, where a strategy needs one; default any free one."""

    def __post_init__(self) -> None:
        require_count("Cluster", "workers", self.workers)
        require_count("Cluster", "spares", self.spares, least=0)
        require_choice("Cluster", "on", self.on, ENGINES)
        require_choice("Cluster", "device", self.device, DEVICES)
        if self.threads is not None:
            require_count("Cluster", "threads", self.threads)
        if self.port is not None and not 0 < self.port < 65536:
            raise SpecError(f"Cluster: port must be between 1 and 65535, found {self.port!r}.")

    @property
    def threads_per_worker(self) -> int:
        """What was asked for, else OMP_NUM_THREADS, else an equal share of the cores."""
        if self.threads is not None:
            return self.threads
        if (given := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
            return max(1, int(given))
        return max(1, len(os.sched_getaffinity(0)) // self.workers)
