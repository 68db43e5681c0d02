"""`HostFacts`: what is known of one machine that takes part in a run."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.spec.checks import require_count
from shoal.spec.world import LOOPBACK


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """A host as its engine, or its agent, describes it."""

    name: str = "this host"
    """What people call it."""
    address: str = LOOPBACK
    """Where processes of other hosts reach those of this one."""
    cores: int = 1
    gpus: int = 0
    memory_bytes: int = 0
    """What its processes may use together; 0 where nobody knows."""
    port: int = 0
    """One that was free at `address` when somebody looked, for a coordinator; 0 where none was looked for."""
    train_port: int = 0
    """Likewise, for the first worker where it sends others their samples."""
    test_port: int = 0

    most_workers: int | None = None
    """More than these are not dealt to it at the start, as whoever started it has decided; None: by its size."""

    def __post_init__(self) -> None:
        require_count("HostFacts", "cores", self.cores)
        for name in ("gpus", "memory_bytes", "port", "train_port", "test_port"):
            require_count("HostFacts", name, getattr(self, name), least=0)
        if self.most_workers is not None:
            require_count("HostFacts", "most_workers", self.most_workers, least=0)
