"""`Footprint`: what a job lays out in memory and what it sends, as plain data.

A strategy's spec computes it from sizes (`model_size.py`). Segments are reserved from it, `--explain` shows it and
`--memory` is judged by it, so that the three cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

PAGE_BYTES = 4096
"""Every region of a segment begins with a page of its own."""
LINE_BYTES = 64
"""A cache line: tensors begin at multiples of it."""


class Medium(StrEnum):
    """What bytes go through on their way from one process to another."""

    MEMORY = "the host's memory"
    NETWORK = "sockets"


class Stay(StrEnum):
    """How long a process has a region."""

    ALWAYS = "always"
    OPENING = "before the first step"
    """While the model is made and put in its place."""
    TRAINING = "in a step"


@dataclass(frozen=True, kw_only=True)
class MemoryRegion:
    """Memory with one purpose."""

    name: str
    """By which it is reserved."""
    what: str
    """Its purpose in words; regions with the same words are told of together."""
    num_bytes: int
    stay: Stay = Stay.ALWAYS
    is_used: bool = True
    """Whether it is written while nobody dies and nobody new comes. Else it is mapped and costs no memory."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What a worker sends or reads in one step."""

    what: str
    medium: Medium
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Regions of one purpose: so many bytes, so many times."""

    what: str
    num_bytes: int
    times: int
    stay: Stay = Stay.ALWAYS
    unused: int = 0
    """Bytes that are mapped besides, and written only when somebody dies or comes."""

    @property
    def total(self) -> int:
        """Bytes of all that are used."""
        return self.num_bytes * self.times


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory of a job on one host, and its traffic. The processes' own libraries come on top."""

    shared: tuple[MemoryRegion, ...] = ()
    """Laid out once, in this order, in the segment that all workers and servers map."""
    worker: tuple[MemoryRegion, ...] = ()
    """Of its own, at the worker that needs most."""
    workers: int = 1
    server: tuple[MemoryRegion, ...] = ()
    """Of its own, at each server."""
    servers: int = 0
    flows: tuple[Flow, ...] = ()
    """Per step and worker."""

    @property
    def mapped_bytes(self) -> int:
        """The segment's size."""
        return sum(paged(region.num_bytes) for region in self.shared)

    @property
    def shared_bytes(self) -> int:
        """What of the segment is written while nobody dies."""
        return sum(paged(region.num_bytes) for region in self.shared if region.is_used)

    @property
    def unused_bytes(self) -> int:
        """What a worker maps, of the segment or of its own, and does not touch while nobody dies."""
        unused = (region for region in (*self.shared, *self.worker) if not region.is_used)
        return sum(paged(region.num_bytes) for region in unused)

    @property
    def own_bytes(self) -> int:
        """A worker's own at its worst moment: before the first step, or in a step."""
        return _most(self.worker)

    @property
    def worker_bytes(self) -> int:
        """What `--memory` must allow a worker: its own, and the segment as far as it is used."""
        return self.shared_bytes + self.own_bytes

    @property
    def host_bytes(self) -> int:
        """Of all processes at their worst moments; what they share counts once."""
        return self.shared_bytes + self.workers * self.own_bytes + self.servers * _most(self.server)

    def plain(self) -> dict[str, Any]:
        """As data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Footprint:
        """What `plain` has written."""

        def regions(part: str) -> tuple[MemoryRegion, ...]:
            return tuple(MemoryRegion(**{**one, "stay": Stay(one["stay"])}) for one in plain[part])

        return cls(
            shared=regions("shared"),
            worker=regions("worker"),
            workers=plain["workers"],
            server=regions("server"),
            servers=plain["servers"],
            flows=tuple(Flow(**{**flow, "medium": Medium(flow["medium"])}) for flow in plain["flows"]),
        )


def paged(num_bytes: int) -> int:
    """Whole pages that hold so many bytes."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def aligned(num_bytes: int) -> int:
    """Whole cache lines that hold so many bytes."""
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


def _most(regions: Iterable[MemoryRegion]) -> int:
    sums = dict.fromkeys(Stay, 0)
    for region in regions:
        sums[region.stay] += region.num_bytes * region.is_used
    return sums[Stay.ALWAYS] + max(sums[Stay.OPENING], sums[Stay.TRAINING])


def told_of(regions: Iterable[MemoryRegion], times: int = 1) -> list[Holding]:
    """By purpose, in the order in which they are laid out; those of different sizes are added up."""
    by_purpose: dict[tuple[str, Stay], list[MemoryRegion]] = {}
    for region in regions:
        by_purpose.setdefault((region.what, region.stay), []).append(region)
    found = []
    for (what, stay), several in by_purpose.items():
        sizes = [region.num_bytes for region in several if region.is_used and region.num_bytes]
        unused = sum(region.num_bytes for region in several if not region.is_used)
        if not sizes and not unused:
            continue
        size, count = (sizes[0], len(sizes)) if len(set(sizes)) == 1 else (sum(sizes), 1)
        found.append(Holding(what=what, num_bytes=size, times=count * times, stay=stay, unused=unused * times))
    return found
