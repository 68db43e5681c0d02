"""Suites for the parts of a mesh: how a lane computes (`Line`), and who keeps which elements (`Sharding`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from helpers.forked import in_processes
from helpers.supplying import OneBatch
from shoal.feed.parts import Part
from shoal.model.replica import Replica
from shoal.spec import Cluster, Task, World, parse_strategy
from shoal.step.work import Work
from shoal.strategies import make_strategy
from shoal.strategies.base import Company, Extent, Setting
from shoal.strategies.mesh.strategy import MeshStrategy

BATCH = 8
INPUTS = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(4))
TARGETS = torch.arange(BATCH) % 3
SHARDINGS = [
    "mesh:data=2",
    "sharded:stage=1",
    "sharded:stage=2,policy=count",
    "sharded:stage=3",
    "sharded:stage=3,policy=layer",
]
LINES = [
    ("sharded", 1),
    ("pipeline", 2),
    ("pipeline:schedule=zero-bubble", 2),
    pytest.param("mesh:data=2,pipeline=2", 4, marks=pytest.mark.long),
]


class Net(nn.Module):
    """Three layers that are used, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


TASK = Task(
    model=Net,
    loss=F.cross_entropy,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    train=TensorDataset(INPUTS, TARGETS),
)


def open_mesh(written: str, world: World) -> tuple[MeshStrategy, Work]:
    """A worker's part of the mesh, and its part of the only batch there is."""
    spec = parse_strategy(written)
    conduct = spec.conduct(Cluster(workers=world.world_size))
    setting = Setting(
        world=world,
        conduct=conduct,
        extent=Extent(total_steps=2, batch_size=BATCH),
        company=Company(report=lambda line: None),
        supply=OneBatch((INPUTS, TARGETS)),
    )
    strategy = cast(MeshStrategy, make_strategy(spec, world, conduct.slots))
    replica = Replica(TASK, sample=lambda: (INPUTS, TARGETS))
    strategy.open(replica, setting)
    replica.train_mode()
    slots, (slot,) = conduct.slots, conduct.fills[world.global_rank]
    mine = slice(BATCH * slot // slots, BATCH * (slot + 1) // slots)
    count = mine.stop - mine.start
    part = Part(slot, lambda: iter([((INPUTS[mine], TARGETS[mine]), float(count), count)]), float(BATCH))
    return strategy, Work(1, (part,), 0)


def whole_gradients(lane: slice) -> dict[str, list[float]]:
    """Of these samples' share of the mean loss."""
    replica = Replica(TASK)
    output = replica.module(INPUTS[lane])
    (F.cross_entropy(output, TARGETS[lane], reduction="sum") / BATCH).backward()
    return {name: p.grad.flatten().tolist() for name, p in replica.trained.items() if p.grad is not None}


def lanes(count: int) -> list[slice]:
    return [slice(BATCH * lane // count, BATCH * (lane + 1) // count) for lane in range(count)]


# Who keeps which elements.


@pytest.mark.parametrize("written", SHARDINGS)
def test_every_element_is_kept_by_somebody_once(written: str) -> None:
    def look(world: World) -> dict[str, Any]:
        strategy, _ = open_mesh(written, world)
        sharding = strategy._sharding
        found = {
            name: [sharding.part(name).numel(), [[span.start, span.stop] for span in sharding.spans(name)]]
            for name in strategy.held
        }
        strategy.close()
        return found

    sizes = {name: p.numel() for name, p in Replica(TASK).trained.items()}
    answers = in_processes(2, look)
    for name, size in sizes.items():
        parts, spans = [answer[name][0] for answer in answers], answers[0][name][1]
        assert all(answer[name][1] == spans for answer in answers), "all know who keeps what"
        if not spans:
            assert parts == [size] * 2
            continue
        assert parts == [stop - start for start, stop in spans]
        covered = sorted(span for span in spans if span[1] > span[0])
        assert [covered[0][0], covered[-1][1]] == [0, size] and sum(parts) == size


@pytest.mark.parametrize("written", SHARDINGS)
def test_owners_get_the_sum_of_what_all_found(written: str) -> None:
    def run(world: World) -> dict[str, Any]:
        strategy, work = open_mesh(written, world)
        sharding = strategy._sharding
        with sharding.in_use():
            strategy._line.backward(work, sharding.backward)
        names = [name for name in strategy.held if sharding.has_gradient(name)]
        sharding.reduce(names)
        found = {}
        for name in strategy.held:
            gradient = sharding.part(name).grad
            found[name] = None if gradient is None else gradient.flatten().tolist()
        spans = {name: [[span.start, span.stop] for span in sharding.spans(name)] for name in names}
        sharding.refresh()
        strategy.close()
        return {"names": names, "found": found, "spans": spans}

    by_lane = [whole_gradients(lane) for lane in lanes(2)]
    total = whole_gradients(slice(0, BATCH))
    for rank, answer in enumerate(in_processes(2, run)):
        assert set(answer["names"]) == set(total), "those that were used"
        for name, gradient in answer["found"].items():
            if name not in total:
                assert gradient is None
            elif spans := answer["spans"][name]:
                start, stop = spans[rank]
                assert gradient == pytest.approx(total[name][start:stop], abs=1e-6)
            else:  # copies add theirs up elsewhere
                assert gradient == pytest.approx(by_lane[rank][name], abs=1e-6)


@pytest.mark.parametrize("written", SHARDINGS)
def test_the_next_pass_finds_what_the_optimizer_left(written: str) -> None:
    def run(world: World) -> list[float]:
        strategy, _ = open_mesh(written, world)
        for name in strategy.held:
            strategy._sharding.part(name).data.add_(0.25)
        strategy._sharding.refresh()
        with torch.no_grad(), strategy._sharding.in_use():
            output = strategy._line.infer(INPUTS)
        strategy.close()
        return output.flatten().tolist()

    replica = Replica(TASK)
    with torch.no_grad():
        for param in replica.trained.values():
            param.add_(0.25)
        expected = replica.module(INPUTS).flatten().tolist()
    for found in in_processes(2, run):
        assert found == pytest.approx(expected, abs=1e-6)


# How a lane computes.


def on_lines(written: str, size: int, work: Callable[[MeshStrategy, Work], Any]) -> list[Any]:
    def run(world: World) -> Any:
        strategy, own = open_mesh(written, world)
        found = work(strategy, own)
        strategy.close()
        return found

    return in_processes(size, run)


@pytest.mark.parametrize(("written", "size"), LINES)
def test_all_know_who_has_what(written: str, size: int) -> None:
    """Names are the task's, whatever this process calls its part."""

    def look(strategy: MeshStrategy, _: Work) -> dict[str, Any]:
        line = strategy._line
        here = sorted({line.names[name] for name, _ in line.module.named_parameters()})
        return {"here": here, "stages": {name: list(stages) for name, stages in line.stages.items()}}

    answers = on_lines(written, size, look)
    names = set(Replica(TASK).trained)
    assert {name for answer in answers for name in answer["here"]} == names
    for answer in answers:
        assert answer["stages"] == answers[0]["stages"] and names <= answer["stages"].keys()


@pytest.mark.parametrize(("written", "size"), LINES)
def test_a_lane_leaves_the_gradients_of_its_samples(written: str, size: int) -> None:
    def run(strategy: MeshStrategy, work: Work) -> dict[str, Any]:
        line = strategy._line
        with strategy._sharding.in_use():
            own = line.backward(work, strategy._sharding.backward)
        named = ((line.names[name], p.grad) for name, p in line.module.named_parameters())
        found = {name: grad.flatten().tolist() for name, grad in named if grad is not None}
        return {"found": found, "slot": work.parts[0].slot, "weight": own.sums.weight, "speaks": own.speaks}

    answers = on_lines(written, size, run)
    slots = 1 + max(answer["slot"] for answer in answers)
    for slot in range(slots):
        members = [answer for answer in answers if answer["slot"] == slot]
        assert sum(answer["speaks"] for answer in members) == 1, "one tells the others what the lane has found"
        assert all(answer["weight"] == BATCH / slots for answer in members)
        expected = whole_gradients(lanes(slots)[slot])
        assert set().union(*(answer["found"] for answer in members)) == set(expected)
        for answer in members:
            for name, gradient in answer["found"].items():
                assert gradient == pytest.approx(expected[name], abs=1e-6)


@pytest.mark.parametrize(("written", "size"), LINES)
def test_somebody_of_a_lane_has_the_output(written: str, size: int) -> None:
    def run(strategy: MeshStrategy, _: Work) -> Any:
        with torch.no_grad(), strategy._sharding.in_use():
            output = strategy._line.infer(INPUTS)
        return None if output is None else output.flatten().tolist()

    with torch.no_grad():
        expected = Replica(TASK).module(INPUTS).flatten().tolist()
    found = [output for output in on_lines(written, size, run) if output is not None]
    assert found
    for output in found:
        assert output == pytest.approx(expected, abs=1e-6)
