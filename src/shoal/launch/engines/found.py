"""Which world this process was started in, by somebody else: read from its environment, and from nothing else.

Launchers tell each process its rank and how many there are; so do TF_CONFIG and the flags of classic TensorFlow. A
function for each says what that means here, in the same words; what then happens is the same for all
(`meeting.py`). An allocation of Slurm has hosts and no ranks yet: an engine starts agents there.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import SpecError

HOST_VARIABLE = "SHOAL_HOST_NAME"
"""What to call this host, where its own name does not tell it from others."""
AUTO = "auto"
FOUND = (AUTO, "mpi", "slurm")
"""What `--on` may say for a world that is found, besides nothing."""
TF_CONFIG = "TF_CONFIG"
_TOGETHER_S = 12.0
"""How long to wait for the next rank of a launcher, which starts all at once."""
_ONE_BY_ONE_S = 60.0
"""The same, where people start each by itself."""

Environment = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class FoundRank:
    """A process among others that run the same command."""

    by: str
    """Who started them, for people: `MPI`, `Slurm job 7`."""
    rank: int | None
    """Its number; the first runs the supervisor. None: one more, which has nothing to do (an evaluator)."""
    size: int
    """How many there are, all together."""
    workers: int
    """How many of them train."""
    identity: str
    """What all of them, and no others that run now, have in common."""
    host: str
    """What their launcher calls the host of this one."""
    group: str = ""
    """What tells it from another host of that name."""
    local_rank: int = 0
    """Its number on its host."""
    patience_s: float = _TOGETHER_S

    @property
    def servers(self) -> int:
        """How many of them serve parameters; the ranks behind those that train."""
        return self.size - self.workers

    @property
    def is_worker(self) -> bool:
        """Whether this one trains."""
        return self.rank is not None and self.rank < self.workers


@dataclass(frozen=True, kw_only=True)
class FoundHosts:
    """Hosts that were given to this process, on which nothing runs yet."""

    by: str
    on: str
    """The engine that reaches them."""
    count: int
    workers: int
    """As many as whoever gave them wanted."""


Found = FoundRank | FoundHosts


def find_world(environ: Environment, on: str | None = None) -> Found | None:
    """The world that this process is in; None where there is none, or it is not asked for. `on` as in `--on`."""
    if on is not None and on not in FOUND:
        return None
    ways: dict[str, Callable[[Environment], Found | None]] = {
        "torchrun": _of_torchrun,
        "mpi": _of_mpi,
        "slurm": _of_slurm,
        "tensorflow": _of_tf_config,
    }
    for name, look in ways.items():  # Who was started last counts: torchrun may run in a step of Slurm's.
        if on in (None, AUTO, name) and (found := look(environ)) is not None:
            return found
    return None


def guess_local_rank(environ: Environment) -> int:
    """This process's number on its host; 0 where it is alone, or nobody can say."""
    try:
        found = find_world(environ)
    except SpecError:
        return 0  # Whoever reads the command line says so.
    return found.local_rank if isinstance(found, FoundRank) else 0


def _of_torchrun(environ: Environment) -> FoundRank | None:
    if "TORCHELASTIC_RUN_ID" not in environ or "RANK" not in environ:
        return None
    rank, size = _numbers(environ, "torchrun", "RANK", "WORLD_SIZE")
    (group,) = _numbers(environ, "torchrun", "GROUP_RANK")
    common = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    return _launched(
        "torchrun",
        rank,
        size,
        identity=[environ.get(name, "") for name in common],
        host=_own_name(environ),
        group=str(group),
        local_rank=environ.get("LOCAL_RANK", "0"),
    )


def _of_mpi(environ: Environment) -> FoundRank | None:
    """Open MPI's own variables; those of PMI, which MPICH and Intel's MPI set, are also Slurm's."""
    if "OMPI_COMM_WORLD_RANK" in environ:
        rank, size = _numbers(environ, "MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
        local_rank = environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")
        common = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")
    elif "PMI_RANK" in environ and "SLURM_STEP_ID" not in environ:
        rank, size = _numbers(environ, "MPI", "PMI_RANK", "PMI_SIZE")
        local_rank = environ.get("MPI_LOCALRANKID", "0")
        common = ("PMI_JOBID", "PMI_PORT")
    else:
        return None
    identity = [environ.get(name, "") for name in common]
    return _launched("MPI", rank, size, identity=identity, host=_own_name(environ), local_rank=local_rank)


def _of_slurm(environ: Environment) -> Found | None:
    """The tasks of a step, or an allocation: there the batch script, or the shell of `salloc`, is alone."""
    if not (job := environ.get("SLURM_JOB_ID")):
        return None
    by = f"Slurm job {job}"
    if "SLURM_STEP_ID" not in environ:
        (nodes,) = _numbers(environ, by, "SLURM_JOB_NUM_NODES")
        wanted = environ.get("SLURM_NTASKS", "")
        workers = int(wanted) if wanted.isdecimal() and int(wanted) > nodes else nodes
        return FoundHosts(by=by, on="slurm", count=nodes, workers=workers)
    rank, size = _numbers(environ, by, "SLURM_PROCID", "SLURM_NTASKS")
    return _launched(
        by,
        rank,
        size,
        identity=[job, environ["SLURM_STEP_ID"], environ.get("SLURM_RESTART_COUNT", "0")],
        host=environ.get(HOST_VARIABLE) or environ.get("SLURMD_NODENAME") or socket.gethostname(),
        local_rank=environ.get("SLURM_LOCALID", "0"),
    )


def _of_tf_config(environ: Environment) -> FoundRank | None:
    if not (text := environ.get(TF_CONFIG, "").strip()):
        return None
    try:
        config = json.loads(text)
        cluster: dict[str, Any] = config.get("cluster") or {}
        task = config.get("task") or {}
        tasks = {name: [str(one) for one in cluster.get(name, ())] for name in _TF_TASKS}
        kind, index = str(task.get("type", "")), int(task.get("index", 0))
    except (AttributeError, TypeError, ValueError):
        raise SpecError(
            f"{TF_CONFIG} must be an object with cluster and task, as TensorFlow writes it, found {text[:80]!r}; "
            "unset it, or say --on local."
        ) from None
    return _of_tasks(TF_CONFIG, tasks, kind, index)


_TF_TASKS = ("chief", "master", "worker", "ps")
_TF_OTHERS = ("evaluator",)


def of_flags(ps_hosts: str, worker_hosts: str, job_name: str, task_index: int) -> FoundRank:
    """The world that the flags of classic TensorFlow tell of."""
    tasks = {
        "worker": [one for one in worker_hosts.split(",") if one],
        "ps": [one for one in ps_hosts.split(",") if one],
    }
    found = _of_tasks("--worker_hosts and --ps_hosts", tasks, job_name, task_index)
    if found is None:
        raise SpecError("--worker_hosts names nobody who trains; write --worker_hosts=a:2222,b:2222.")
    return found


def _of_tasks(by: str, tasks: Mapping[str, Sequence[str]], kind: str, index: int) -> FoundRank | None:
    """Ranks in TensorFlow's order: the chief, workers, then servers."""
    addresses = [(name, number, one) for name in _TF_TASKS for number, one in enumerate(tasks.get(name, ()))]
    workers = sum(name != "ps" for name, _, _ in addresses)
    if len(addresses) < 2 or not workers:
        return None
    identity = json.dumps(addresses)
    if kind in _TF_OTHERS:
        return FoundRank(
            by=by,
            rank=None,
            size=len(addresses),
            workers=workers,
            identity=identity,
            host="",
            local_rank=1,
            patience_s=_ONE_BY_ONE_S,
        )
    ranks = {(name, number): rank for rank, (name, number, _) in enumerate(addresses)}
    if (rank := ranks.get((kind, index))) is None:
        counts = ", ".join(f"{len(those)} {name}" for name, those in tasks.items() if those)
        raise SpecError(
            f"{by}: this process is task {index} of type {kind!r}, but there are {counts}; give each process the "
            "type and index of one of them."
        )
    hosts = [address.rpartition(":")[0] or address for _, _, address in addresses]
    return FoundRank(
        by=by,
        rank=rank,
        size=len(addresses),
        workers=workers,
        identity=identity,
        host=hosts[rank],
        local_rank=hosts[:rank].count(hosts[rank]),
        patience_s=_ONE_BY_ONE_S,
    )


def _launched(
    by: str, rank: int, size: int, *, identity: Sequence[str], host: str, group: str = "", local_rank: str
) -> FoundRank | None:
    """A rank of a launcher; None where it is alone, as in a shell that one was asked for."""
    if size < 2:
        return None
    if not 0 <= rank < size:
        raise SpecError(
            f"{by}: this process is said to be rank {rank} of {size}; start it as the others, or say --on local."
        )
    return FoundRank(
        by=by,
        rank=rank,
        size=size,
        workers=size,
        identity=json.dumps([*identity, size]),
        host=host,
        group=group,
        local_rank=int(local_rank) if local_rank.isdecimal() else 0,
    )


def _own_name(environ: Environment) -> str:
    return environ.get(HOST_VARIABLE) or socket.gethostname()


def _numbers(environ: Environment, by: str, *names: str) -> list[int]:
    """The numbers in these variables."""
    for name in names:
        if not environ.get(name, "").strip().isdecimal():
            raise SpecError(
                f"{by} was found in the environment, but {name} is {environ.get(name, '')!r} and no number; start "
                "all processes with the launcher, or say --on local."
            )
    return [int(environ[name]) for name in names]
