"""What a process maps is what the footprint says, to the byte, also where that is computed without any values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.arena import Segment
from shoal.model.blueprint import Blueprint
from shoal.model.replica import Replica
from shoal.roles.memory.sizing import size_up
from shoal.spec import Cluster, Job, ParameterServer, Task, World
from shoal.spec.footprint import Footprint, MemoryRegion
from shoal.strategies import make_strategy
from shoal.strategies.average.arena import ArenaAverage
from shoal.strategies.base import Company, Extent, Setting
from shoal.strategies.data.arena import ArenaData
from shoal.strategies.ps.served import Served

WORKERS = 2
EXTENT = Extent(total_steps=7, tables=3, table_rows=5, table_columns=3, accumulate=2)


class Odd(nn.Module):
    """Parameters of odd sizes and two dtypes, some frozen; buffers that move and one that rests."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(67, 501)
        self.norm = nn.BatchNorm1d(501)
        self.frozen = nn.Linear(501, 13).requires_grad_(False)
        self.last = nn.Linear(13, 3, dtype=torch.float64)
        self.register_buffer("mask", torch.ones(5000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.norm(self.first(x))).double())


class Whole(torch.optim.SGD):
    """A subclass may do anything, so it gets the whole model."""


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "whole": lambda params: Whole(params, lr=0.1, momentum=0.9),
}


def make_task(optimizer: str, **changes: Any) -> Task:
    task = Task(
        model=Odd,
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: OPTIMIZERS[optimizer]([p for p in params if p.requires_grad]),
        train=TensorDataset(torch.zeros(8, 67), torch.zeros(8, dtype=torch.int64)),
        batch_size=8,
    )
    return replace(task, **changes)


def footprint_of(task: Task, job: Job) -> Footprint:
    blueprint = Blueprint.drawn(task)
    assert blueprint is not None and all(p.is_meta for p in blueprint.trained.values())
    return size_up(job, blueprint, extent=EXTENT).footprint


def check_mapped(segment: Segment, regions: tuple[MemoryRegion, ...]) -> None:
    for region in regions:
        assert segment.tensor(region.name, torch.uint8).numel() == region.num_bytes, region.name
    assert segment.nbytes == Footprint(shared=regions).mapped_bytes


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("strategy", "slots", "precision", "changes"),
    [
        ("data", 2, "fp32", {}),
        ("data:via=arena", 5, "fp16", {"clip_norm": 1.0}),
        ("data:shares=speed", 2, "adaptive", {}),
        ("data:batchnorm=sync,journal=off", 2, "fp32", {}),
    ],
)
def test_workers_that_share_memory(
    optimizer: str, strategy: str, slots: int, precision: str, changes: dict[str, Any]
) -> None:
    task = make_task(optimizer, **changes)
    cluster = Cluster(workers=WORKERS)
    job = Job(target="x.py", strategy=strategy, cluster=cluster, slots=slots, precision=precision)
    world = World(world_size=WORKERS)
    opened = make_strategy(job.spec, world, slots)
    assert isinstance(opened, ArenaData)
    setting = Setting(
        world=world,
        conduct=job.conduct,
        extent=EXTENT,
        clip_norm=task.clip_norm,
        company=Company(report=lambda line: None),
    )
    opened.open(Replica(task, precision=precision), setting)

    found = footprint_of(task, job)
    check_mapped(opened._shared.segment, found.shared)
    assert found.mapped_bytes == found.shared_bytes + sum(
        Footprint(shared=(region,)).mapped_bytes for region in found.shared if not region.is_used
    )
    opened.close()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "strategy",
    [
        "average:every=3",
        "average:every=2,outer=adam",
        "average:with=ring",
        "average:clients=2,partition=own,every=1,scaffold=on",
        "average:clients=2,partition=own,every=1,buffer=2,oldest=4",
    ],
)
def test_workers_that_leave_what_they_have_when_they_meet(optimizer: str, strategy: str) -> None:
    task = make_task(optimizer)
    job = Job(target="x.py", strategy=strategy, cluster=Cluster(workers=WORKERS))
    world = World(world_size=WORKERS, places=tuple(range(WORKERS)))  # all meet when they begin
    opened = make_strategy(job.spec, world, WORKERS)
    assert isinstance(opened, ArenaAverage)
    opened.open(Replica(task), Setting(world=world, conduct=job.conduct, extent=EXTENT))
    check_mapped(opened._memory.segment, footprint_of(task, job).shared)
    opened.close()


SERVED = [
    "ps",
    "ps:servers=2,shards=5",
    "ps:servers=2,replicas=0,sync=ssp:2,placement=layer",
    "ps:sync=asp",
    "ps:sync=asp,diverging=ignore,journal=off",
    "ps:push=parameters",
    "ps:wire=tcp,shards=3",
    "ps:servers=host",
    "ps:servers=host,agree=scatter-sum,sync=asp",
]


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [(strategy, optimizer) for strategy in SERVED for optimizer in ("sgd", "adamw")]
    + [("ps", "whole"), ("ps:servers=2,sync=asp", "whole")],
)
@pytest.mark.parametrize("changes", [{}, {"clip_norm": 1.0}], ids=["plain", "clipped"])
def test_servers_and_workers(strategy: str, optimizer: str, changes: dict[str, Any]) -> None:
    task = make_task(optimizer, **changes)
    job = Job(target="x.py", strategy=strategy, cluster=Cluster(workers=WORKERS))
    spec = ParameterServer.of(job)
    served = Served.open(
        spec, Replica(task), World(world_size=WORKERS), slots=job.num_slots, workers=job.cluster.workers
    )

    blueprint = Blueprint.drawn(task)
    assert blueprint is not None
    sizes = size_up(job, blueprint, extent=EXTENT)
    regions = spec.segment_regions(sizes.model, sizes.run, sizes.cut)
    memory = served.memory
    for region in regions:
        assert memory.tensor(region.name, torch.uint8).numel() == region.num_bytes, region.name
    mapped = sum(segment.nbytes for segment in {memory.segment, memory.pushed})
    assert mapped == Footprint(shared=regions).mapped_bytes
    assert sizes.footprint.shared == (() if spec.wire == "tcp" else regions)


@pytest.mark.parametrize(
    ("strategy", "mapped", "used"),
    [
        # Two homes for values and AdamW's two numbers, six buffers for each of two slots; of these one, and two.
        ("ps", 2 * 3 + 2 * 6, 3 + 2 * 2),
        # A home each for what is marked, and buffers for eight more workers.
        ("ps:sync=asp", 4 * 3 + 10 * 6, 2 * 3 + 2 * 2),
        ("ps:servers=2", 2 * 3 + 2 * 6, 2 * 3 + 2 * 2),
        ("data", 3 + 2, 3 + 2),
    ],
)
def test_mapped_and_used_in_copies_of_the_parameters(strategy: str, mapped: int, used: int) -> None:
    task = make_task("adamw", model=lambda: nn.Linear(2048, 2048, bias=False))
    found = footprint_of(task, Job(target="x.py", strategy=strategy, cluster=Cluster(workers=WORKERS)))
    copy = 4 * 2048 * 2048
    journals = sum(region.num_bytes for region in found.shared if "journal" in region.what)
    assert (found.mapped_bytes - journals) / copy == pytest.approx(mapped, abs=0.1)
    assert (
        found.shared_bytes
        - sum(region.num_bytes for region in found.shared if "journal" in region.what and region.is_used)
    ) / copy == pytest.approx(used, abs=0.1)
    assert found.unused_bytes == found.mapped_bytes - found.shared_bytes
