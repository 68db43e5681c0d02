"""`--recompute` in a pipeline: each stage is computed once more on its way back, whatever the model looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from helpers.forked import in_processes
from helpers.supplying import OneBatch
from shoal.feed.parts import LoadedBatch, Part
from shoal.model.replica import Replica
from shoal.spec import Cluster, Task, World, parse_strategy
from shoal.step.work import Work
from shoal.strategies import make_strategy
from shoal.strategies.base import Company, Extent, Setting

MICROBATCHES, ROWS = 3, 4
INPUTS = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(4))
TARGETS = torch.arange(ROWS) % 3


def bare() -> nn.Sequential:
    """The model itself is the sequence that is cut."""
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


TASK = Task(
    model=bare,
    loss=F.cross_entropy,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    train=TensorDataset(INPUTS, TARGETS),
)


def load() -> Iterator[LoadedBatch]:
    for _ in range(MICROBATCHES):
        yield (INPUTS, TARGETS), float(ROWS), ROWS


def count_calls(*, recompute: bool) -> Callable[[World], dict[str, int]]:
    """By layer of a worker's stage: how often one step calls it."""

    def work(world: World) -> dict[str, int]:
        spec = parse_strategy("pipeline:split=2+3")
        replica = Replica(TASK, recompute=recompute)
        strategy = make_strategy(spec, world, 1)
        setting = Setting(
            world=world,
            conduct=spec.conduct(Cluster(workers=world.world_size)),
            extent=Extent(total_steps=1, accumulate=MICROBATCHES),
            clip_norm=None,
            company=Company(report=lambda line: None),
            supply=OneBatch((INPUTS, TARGETS)),
        )
        strategy.open(replica, setting)
        replica.train_mode()
        calls: dict[str, int] = {}
        for name, layer in replica.module.named_modules():
            if isinstance(layer, nn.Linear):
                calls[name] = 0
                layer.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
        strategy.take(Work(1, (Part(0, load, None),), 0))
        strategy.close()
        return calls

    return work


def test_each_stage_of_a_bare_sequence_is_computed_twice() -> None:
    once, twice = (in_processes(2, count_calls(recompute=recompute)) for recompute in (False, True))
    assert once == [{"stage0.0": MICROBATCHES}, {"stage1.2": MICROBATCHES, "stage1.4": MICROBATCHES}]
    # Nothing reads the output of a stage's last layer on the way back, so that torch stops before it.
    assert twice == [{"stage0.0": 2 * MICROBATCHES}, {"stage1.2": 2 * MICROBATCHES, "stage1.4": MICROBATCHES}]
