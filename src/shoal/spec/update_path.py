"""The way of an update from a worker to the servers: what its written form means, and what cannot go together."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.errors import SpecError
from shoal.spec.checks import require_count
from shoal.spec.parameter_server import MOST_CELLS_PER_PUSH, ParameterServer


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """How a worker gathers gradients before it pushes: `pool=threads:2,ms:50,count:8`."""

    threads: int = 1
    """Gradients that are computed at the same time."""
    ms: int = 0
    """Push after so many milliseconds, with at least one gradient; 0: however long it takes."""
    count: int = 8
    """Push when so many gradients are in."""

    def __post_init__(self) -> None:
        require_count("ps: pool", "threads", self.threads)
        require_count("ps: pool", "count", self.count, most=MOST_CELLS_PER_PUSH)

    @classmethod
    def parse(cls, text: str) -> Pooling:
        """What `threads:2,ms:50,count:8`, or a part of it, names."""
        return cls(**{key: int(value) for key, _, value in (item.partition(":") for item in text.split(","))})


def pooling_of(spec: ParameterServer) -> Pooling | None:
    """How gradients are pooled; None where each is pushed by itself."""
    return None if spec.pool == "none" else Pooling.parse(spec.pool)


def cells_ahead(spec: ParameterServer) -> int:
    """Cells that a worker should have at hand: enough for its next push."""
    if (pooling := pooling_of(spec)) is not None:
        return pooling.count
    return max(spec.every, 2 * spec.cells_per_worker if spec.shares == "speed" else 1)


def num_groups(spec: ParameterServer) -> int | None:
    """Into how many groups workers that push together are divided; None where everybody pushes for itself."""
    if spec.via == "direct":
        return None
    return 1 if spec.via == "ring" else int(spec.via.removeprefix("router:"))


def check_update_path(spec: ParameterServer, workers: int) -> None:
    """Refuse what contradicts itself."""
    groups, pooling = num_groups(spec), pooling_of(spec)
    if spec.servers == "host":
        _check_hosts(spec, workers)
    if groups is not None:
        _check_groups(spec, groups, workers)
    elif spec.leader != "fixed":
        raise SpecError(
            f"Job: leader={spec.leader} says who pushes for a group of workers, but with via=direct everybody "
            "pushes for itself; add via=ring or via=router:N."
        )
    if pooling is not None and (spec.sync != "asp" or spec.push != "gradients"):
        raise SpecError(
            f"Job: pool={spec.pool} gathers gradients at the worker's own pace, which needs sync=asp and "
            f"push=gradients, found sync={spec.sync} and push={spec.push}."
        )


def _check_hosts(spec: ParameterServer, workers: int) -> None:
    """What whole copies, one for each group of workers, can do."""
    wanted = "asp" if spec.agree == "scatter-sum" else "bsp"
    if spec.sync != wanted and not (wanted == "bsp" and spec.is_lockstep):
        raise SpecError(
            f"Job: agree={spec.agree} keeps the copies of servers=host in step with sync={wanted} only, found "
            f"sync={spec.sync}."
        )
    if spec.hosts > workers:
        raise SpecError(
            f"Job: servers=host divides {workers} workers into hosts={spec.hosts} groups; use {workers} at most."
        )
    needs = {"replicas": ("auto", "0"), "wire": ("auto", "memory"), "push": ("gradients",), "via": ("direct",)}
    needs |= {"shares": ("even",), "pool": ("none",), "shards": ("auto",)}
    for name, allowed in needs.items():
        if (found := getattr(spec, name)) not in allowed:
            raise SpecError(
                f"Job: servers=host keeps whole copies, which needs {name}={allowed[-1]}, found {found}."
            )


def _check_groups(spec: ParameterServer, groups: int, workers: int) -> None:
    if not spec.is_lockstep or spec.push != "gradients":
        raise SpecError(
            f"Job: via={spec.via} adds up the gradients of one step, which needs sync=bsp and push=gradients, "
            f"found sync={spec.sync} and push={spec.push}; use those, or via=direct."
        )
    if groups > workers:
        raise SpecError(
            f"Job: via={spec.via} divides {workers} workers into {groups} groups; use router:{workers} at most."
        )
