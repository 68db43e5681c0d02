"""A gradient that overflows anywhere: all processes skip the step, and go on with the same scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from helpers.forked import in_processes
from shoal.feed.parts import LoadedBatch, Part
from shoal.model.half_range import FIRST_SCALE
from shoal.model.replica import Replica
from shoal.spec import Cluster, Task, World, parse_strategy
from shoal.step.work import Work
from shoal.strategies import make_strategy
from shoal.strategies.base import Company, Extent, Setting

BATCH, STEPS, BAD_STEP = 8, 4, 2
CASES = [
    ("data", 1),
    ("data:via=arena", 2),
    ("data:via=ring", 2),
    ("data:via=backend", 2),
    ("sharded", 2),
    ("mesh:data=2", 2),
]
GENERATOR = torch.Generator().manual_seed(4)
INPUTS = torch.randn(BATCH, 4, generator=GENERATOR)
TARGETS = torch.randint(0, 3, (BATCH,), generator=GENERATOR)


def loss(scores: Tensor, target: Tensor) -> Tensor:
    """A target past the classes asks for a loss that no half-precision gradient can hold."""
    is_bad = bool((target >= 3).any())
    return F.cross_entropy(scores, target % 3) * (1e6 if is_bad else 1.0)


TASK = Task(
    model=lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)),
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    train=TensorDataset(INPUTS, TARGETS),
    clip_norm=0.5,
)


def part(step: int, slot: int, slots: int, bad: range) -> Part:
    rows = slice(BATCH * slot // slots, BATCH * (slot + 1) // slots)

    def load() -> Iterator[LoadedBatch]:
        target = TARGETS[rows] + 3 if step == BAD_STEP and slot in bad else TARGETS[rows]
        yield (INPUTS[rows], target), float(len(target)), len(target)

    return Part(slot, load, float(BATCH))


def train(written: str, precision: str, bad: range, slots: int) -> Callable[[World], dict[str, Any]]:
    def work(world: World) -> dict[str, Any]:
        spec, size = parse_strategy(written), world.world_size
        setting = Setting(
            world=world,
            conduct=spec.conduct(Cluster(workers=size), slots),
            extent=Extent(total_steps=STEPS),
            clip_norm=TASK.clip_norm,
            company=Company(report=lambda line: None),
        )
        replica = Replica(TASK, precision=precision)
        strategy = make_strategy(spec, world, slots)
        strategy.open(replica, setting)
        replica.train_mode()
        models, skipped = [], []
        for step in range(1, STEPS + 1):
            parts = tuple(part(step, slot, slots, bad) for slot in setting.slots_of(world.global_rank))
            strategy.take(Work(step, parts, 0))
            state = dict(strategy.model_stream(replica).tensors)
            models.append({name: value.tolist() for name, value in state.items()})
            skipped.append(replica.precision.state.skipped)
        strategy.close()
        return {"models": models, "skipped": skipped, "scale": replica.precision.scale}

    return work


@pytest.mark.parametrize(("written", "size"), CASES, ids=lambda value: str(value))
def test_one_slots_overflow_skips_the_step_for_all(written: str, size: int) -> None:
    bad = range(size - 1, size)
    (reference,) = in_processes(1, train("data:via=arena", "fp16", bad, slots=size))
    answers = in_processes(size, train(written, "fp16", bad, slots=size))
    for answer in (reference, *answers):
        assert answer["skipped"] == [0, 1, 1, 1]
        assert answer["scale"] == FIRST_SCALE / 2
    models = answers[0]["models"]
    assert models[0] == models[1] != models[2] != models[3]
    for ours, expected in zip(models, reference["models"], strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(torch.tensor(ours[name]), torch.tensor(value), rtol=1e-4, atol=1e-6)
    if written.endswith("arena"):
        assert models == reference["models"]


def test_without_overflow_the_scale_leaves_no_trace() -> None:
    """Clipping comes after unscaling: bf16, which has no scale, and adaptive, which has one, end alike."""
    plain, scaled = (
        in_processes(2, train("data:via=arena", kind, range(0), slots=2))[0] for kind in ("bf16", "adaptive")
    )
    assert plain["models"] == scaled["models"]
    assert scaled["scale"] == FIRST_SCALE
