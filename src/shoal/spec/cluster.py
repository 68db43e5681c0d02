"""`Cluster`: where a job runs."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from importlib.metadata import entry_points

from shoal.errors import SpecError
from shoal.spec.checks import require_choice, require_count, require_number
from shoal.spec.link import NetworkLink
from shoal.spec.store import StoreAddress

ENGINES = ("local", "ssh", "hosts", "join", "mpi", "slurm", "ranks", "k8s", "ray", "spark")
ENGINE_POINTS = "shoal.engines"
"""Where packages name engines of their own: `moon = "their.module:make"`."""
FIXED_ENGINES = ("spark", "ranks", "k8s")
"""Those that give a run all of its hosts when it begins."""
MIXED = "cuda+cpu"
"""Both kinds in one job."""
DEVICES = ("cpu", "cuda", MIXED)
_UNITS = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where a job runs: how many processes, on what."""

    workers: int = 1
    """Processes that train. Written `1:4`: at least 1 and at most 4, as the load of the machine allows."""
    spares: int = 0
    """Processes that wait, warm, to take the place of a worker that dies."""
    on: str = "local"
    """Where processes run: `local` (this machine), `local:2` (here, as if on 2 hosts), `ssh:a,b` (hosts that ssh
    reaches), `hosts:FILE` (those that a file lists), `join:2` (2 hosts on which somebody starts `shoal host`),
    `mpi` or `mpi:a,b` (hosts that mpirun reaches), `slurm` (those of an allocation), `ranks:FOLDER` (those of
    processes that have met there), `k8s` (pods of a Kubernetes job, in which this runs), `ray` (nodes of a
    Ray cluster), `spark://host:7077` (executors of Spark)."""
    hosts: str = ""
    """Limits of hosts, as `2:8`: the run begins when 2 are there, takes in others that come, up to 8, and goes on
    without those that leave. Each has its share of `workers`, which are as many as there are at most."""
    interface: str = ""
    """With several hosts: the network or address at which they reach this one; default by route."""
    ports: str = ""
    """With several hosts: where processes may listen, as `20000-20100`; default any free port."""
    trusted_network: bool = False
    """With several hosts: do not encrypt what passes between them."""
    link: str = ""
    """With several hosts: let the network between them seem to be another, as
    `bandwidth=100mbit,latency=20ms,loss=0.1%`."""
    grace: float = 60.0
    """With several hosts: how many seconds they go on when their supervisor has ended, until another takes its
    place; 0: not at all."""
    threads: int | None = None
    """Threads of each process; default its share of the machine's cores."""
    device: str = "cpu"
    """`cpu`, or `cuda`: each worker takes one of the machine's GPUs. `cuda+cpu`, with `ps` or
    `data:shares=speed`: the first workers take a GPU each, and those that are left compute on the processor."""
    port: int | None = None
    """A fixed port for the workers' sockets, where a strategy needs one; default any free one."""
    min_workers: int | None = None
    """With `max_workers`: the fewest processes that train; `workers` is the number to begin with."""
    max_workers: int | None = None
    """The most processes that train; into so many places the work is cut."""
    store: str = ""
    """Where a coordinator keeps what its successor must know: `etcd://host:2379/prefix`, `etcds://…` over TLS
    (`spec/store.py`); default the run folder, or a scratch one."""
    memory: str = ""
    """The most that each worker may use, as `1.5GiB`, beyond what it has when it starts; none: no limit."""

    def __post_init__(self) -> None:
        if isinstance(self.workers, str):
            least, most = parse_workers(self.workers)
            object.__setattr__(self, "workers", least)
            if most is not None:
                object.__setattr__(self, "min_workers", least)
                object.__setattr__(self, "max_workers", most)
        require_count("Cluster", "workers", self.workers)
        self._check_limits()
        require_count("Cluster", "spares", self.spares, least=0)
        self._check_engine()
        if self.hosts:
            self._check_hosts()
        if not 0 <= self.grace < math.inf:
            raise SpecError(f"Cluster: grace must be a number of seconds, 0 or more, found {self.grace!r}.")
        require_choice("Cluster", "device", self.device, DEVICES)
        if self.threads is not None:
            require_count("Cluster", "threads", self.threads)
        if self.port is not None and not 0 < self.port < 65536:
            raise SpecError(f"Cluster: port must be between 1 and 65535, found {self.port!r}.")
        if self.store:
            StoreAddress.parse(self.store)
        if self.memory_bytes is not None and self.device != "cpu":
            raise SpecError(
                f"Cluster: memory={self.memory} limits the host's memory, which device={self.device} maps as it "
                "likes; leave memory out, or use device=cpu."
            )

    def _check_limits(self) -> None:
        if self.min_workers is None and self.max_workers is None:
            return
        require_count("Cluster", "min_workers", self.min_workers)
        require_count("Cluster", "max_workers", self.max_workers)
        assert self.min_workers is not None and self.max_workers is not None
        if not self.min_workers <= self.workers <= self.max_workers:
            raise SpecError(
                f"Cluster: workers={self.workers} is not between min_workers={self.min_workers} and "
                f"max_workers={self.max_workers}; write workers='1:4' for 1 to 4."
            )

    def _check_engine(self) -> None:
        if self.engine not in ENGINES:
            require_choice("Cluster", "on", self.engine, (*ENGINES, *entry_points(group=ENGINE_POINTS).names))
        if self.engine in ("ssh", "hosts") and not self.engine_argument:
            what = "a file that lists hosts" if self.engine == "hosts" else "hosts, as in ssh:a,b"
            raise SpecError(f"Cluster: on={self.on} needs {what}.")
        if self.engine in ("local", "join") and self.on != "local":
            require_number("Cluster", f"on={self.engine}", self.engine_argument)
        if not self.is_remote and (self.interface or self.ports or self.trusted_network or self.link):
            raise SpecError(
                f"Cluster: interface, ports, trusted_network and link are about several hosts, but on={self.on}; "
                "leave them out."
            )
        if self.link:
            NetworkLink.parse(self.link)
        if self.ports and not re.fullmatch(r"[1-9]\d{0,4}-[1-9]\d{0,4}", self.ports):
            raise SpecError(f"Cluster: ports must be a range such as 20000-20100, found {self.ports!r}.")

    def _check_hosts(self) -> None:
        if (found := re.fullmatch(r"([1-9]\d{0,4}):([1-9]\d{0,4})", self.hosts)) is None:
            raise SpecError(f"Cluster: hosts must be limits such as 2:8, found {self.hosts!r}.")
        least, most = map(int, found.groups())
        if most < max(2, least):
            raise SpecError(
                f"Cluster: hosts={self.hosts} must end with 2 or more, and no fewer than it begins with."
            )
        if not self.is_remote or self.engine in FIXED_ENGINES:
            raise SpecError(
                f"Cluster: hosts={self.hosts} lets hosts come and go, but on={self.on} has the same ones from the "
                "first step to the last; use ssh, hosts:FILE, join, ray, slurm, mpi or local:2, or leave them out."
            )
        if self.max_workers is not None:
            raise SpecError(
                f"Cluster: hosts={self.hosts} says how many workers there are, a share of them on each host, and "
                f"so does workers={self.written_workers}; give workers as one number, that of all hosts together."
            )
        if most > self.workers:
            raise SpecError(
                f"Cluster: hosts={self.hosts} allows {most} hosts, but there are workers={self.workers} for all "
                f"of them together; give at least workers={most}."
            )

    @property
    def engine(self) -> str:
        """What starts processes: `ssh` of `ssh:a,b`."""
        return self.on.partition(":")[0]

    @property
    def engine_argument(self) -> str:
        """What it is told: `a,b` of `ssh:a,b`."""
        return self.on.partition(":")[2]

    @property
    def is_remote(self) -> bool:
        """Whether hosts are reached over a network, though it may be this machine's own."""
        return self.on != "local"

    @property
    def is_spread(self) -> bool:
        """Whether there may be more than one of them."""
        if self.hosts:
            return True
        is_one = (self.engine == "ssh" and "," not in self.engine_argument) or (
            "nodes=1" in self.engine_argument.split(",")
        )
        return self.is_remote and not is_one and self.engine_argument != "1"

    @property
    def min_hosts(self) -> int | None:
        """How many hosts a run begins with at least; None where it has those that it is given."""
        return int(self.hosts.partition(":")[0]) if self.hosts else None

    @property
    def max_hosts(self) -> int | None:
        """How many it has at most."""
        return int(self.hosts.partition(":")[2]) if self.hosts else None

    @property
    def workers_per_host(self) -> int:
        """Where hosts come and go: each one's share of the workers when all are there."""
        assert self.max_hosts is not None
        return math.ceil(self.workers / self.max_hosts)

    @property
    def places(self) -> int:
        """Shares into which the work of a synchronous job is cut, for good: the most workers there can be."""
        return self.max_workers or self.workers

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers follows the load."""
        return self.min_workers != self.max_workers

    @property
    def written_workers(self) -> str:
        """The number of workers as one writes it: `2`, or `1:4`."""
        return str(self.workers) if self.max_workers is None else f"{self.min_workers}:{self.max_workers}"

    @property
    def memory_bytes(self) -> int | None:
        """`memory` as a number; None: no limit."""
        return parse_bytes("Cluster", "memory", self.memory) if self.memory else None

    @property
    def threads_per_worker(self) -> int:
        """What was asked for, else OMP_NUM_THREADS, else an equal share of the cores."""
        if self.threads is not None:
            return self.threads
        if (given := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
            return max(1, int(given))
        return max(1, len(os.sched_getaffinity(0)) // self.places)


def parse_workers(text: str) -> tuple[int, int | None]:
    """`2` is (2, None); `1:4`, at least 1 and at most 4, is (1, 4)."""
    least, colon, most = text.partition(":")
    if not least.isdecimal() or not (most.isdecimal() if colon else not most):
        raise SpecError(f"Cluster: workers must be a number, or limits as in 1:4, found {text!r}.")
    if colon and int(most) < int(least):
        raise SpecError(f"Cluster: workers={text} names a lower limit above the upper; write {most}:{least}.")
    return int(least), int(most) if colon else None


def parse_bytes(owner: str, name: str, text: str) -> int:
    """How many bytes a text such as `1.5GiB` means."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip(), re.ASCII)
    unit = None if found is None else _UNITS.get(found[2])
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise SpecError(
            f"{owner}: {name} must be a size such as 1.5GiB or 800MB, found {text!r}; the units are "
            f"{', '.join(_UNITS)}."
        )
    return int(float(found[1]) * unit)
