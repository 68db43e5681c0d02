"""What a plan consists of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shoal.layout import Parcel, Placement, explain, render
from shoal.spec import Job
from shoal.spec.footprint import Footprint, Holding, told_of


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """Bytes of one model."""

    parameters: int
    """Trained ones."""
    state: int
    """What the optimizer keeps for them."""
    fixed: int
    """Buffers, and parameters that are not trained."""


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """Where a worker stands in a grid."""

    worker: int
    lane: int
    """Which part of a batch it works on."""
    coordinates: Mapping[str, int]
    """By axis that has several workers: its index along it."""


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How a strategy would train this model."""

    meaning: str
    """In a sentence."""
    on_failure: str
    placement: Placement | None = None
    """None where no servers share the model out."""
    grid: tuple[GridPoint, ...] = ()
    """None where the model is not cut over workers."""
    width: tuple[str, ...] = ()
    """What becomes of which layers, where they are cut by width."""


def without_successors(job: Job, why: str = "") -> str:
    """What follows a death where nobody can take the place of who died; `why` that is."""
    if job.conduct.outlives_hosts and job.replaces:
        if not job.conduct.has_one_state:
            return "What a lost worker or host did others do, from the beginning of its round on; bits change."
        return "A worker that dies is followed on its host, and others do what a lost host did; no bit changes."
    if job.restarts:
        beginning = "the start" if job.checkpoint == "none" else "the newest checkpoint"
        return f"When a worker dies, all begin again from {beginning}{why}; no bit changes."
    helps = "" if job.on_failure == "stop" else "; with --checkpoint every=200 it goes on from there by itself"
    return f"A worker that dies ends the run{why}{helps}."


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What would run, where everything would lie, and what happens when something fails."""

    target: str
    world: str
    strategy: str
    manner: Manner
    data: str
    steps: int
    slots: int
    optimizer: str
    sizes: ModelBytes
    parcels: tuple[Parcel, ...]
    footprint: Footprint
    limited: Footprint
    """What it would be within a limit of memory."""
    process_bytes: int = 0
    """What a process of ours takes before it has read the task, measured on this host."""
    hosts: tuple[str, ...] = ()
    """A line for each, where there are several: who would be there."""

    @property
    def cells(self) -> int:
        """Parts of the data in the whole run: a slot of a step each."""
        return self.steps * self.slots

    @property
    def memory_bytes(self) -> int:
        """Of the host, at the worst moment of each process."""
        found = self.footprint
        return found.host_bytes + (found.workers + found.servers) * self.process_bytes

    @property
    def placement_table(self) -> str:
        """Which server would hold what; empty where the model is not shared out."""
        return "" if self.manner.placement is None else render(self.manner.placement, self.parcels)

    def to_dict(self) -> dict[str, Any]:
        """This plan as plain data, for JSON."""
        names = ("target", "world", "strategy", "data", "steps", "slots", "cells", "optimizer", "memory_bytes")
        plain = {name: getattr(self, name) for name in names} | asdict(self.sizes)
        plain |= {"hosts": list(self.hosts)} if self.hosts else {}
        plain |= {"meaning": self.manner.meaning, "on_failure": self.manner.on_failure}
        found = self.footprint
        plain |= {
            "worker_bytes": self.limited.worker_bytes,
            "process_bytes": self.process_bytes,
            "mapped_bytes": found.mapped_bytes,
            "unused_bytes": self.limited.unused_bytes,
            "memory": {
                "shared": _plain(told_of(found.shared)),
                "worker": _plain(told_of(found.worker)),
                "server": _plain(told_of(found.server)),
            },
            "traffic": [asdict(flow) for flow in found.flows],
        }
        if self.manner.width:
            plain["width"] = list(self.manner.width)
        if self.manner.grid:
            plain["grid"] = [asdict(point) for point in self.manner.grid]
        if self.manner.placement is not None:
            rows = explain(self.manner.placement, self.parcels)
            plain["servers"] = [asdict(row) | {"cut": sorted(row.cut)} for row in rows]
            plain["imbalance"] = self.manner.placement.imbalance
        return plain


def _plain(holdings: Iterable[Holding]) -> list[dict[str, Any]]:
    return [{**asdict(one), "total": one.total} for one in holdings]
