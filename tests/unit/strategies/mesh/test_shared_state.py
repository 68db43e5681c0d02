"""Sharded state in memory that workers share: the same bits as where each keeps its part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from helpers.forked import in_processes
from shoal.feed.parts import Part
from shoal.model.replica import Replica
from shoal.spec import Cluster, Conduct, Task, World, parse_strategy
from shoal.spec.conduct import even_fills
from shoal.step.work import Work
from shoal.strategies import make_strategy
from shoal.strategies.base import Company, Extent, Setting
from shoal.strategies.groups.opening import open_group
from shoal.strategies.mesh.sharded.shared_vector import row_bytes, row_regions

WORKERS, STEPS, WIDTH = 3, 3, 600
GENERATOR = torch.Generator().manual_seed(3)
INPUTS, TARGETS = (
    torch.randn(WORKERS * 2, WIDTH, generator=GENERATOR),
    torch.randn(WORKERS * 2, generator=GENERATOR),
)


class Choosy(nn.Module):
    """A layer that writes its gradient to its place, and one that only the samples of some workers use."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, WIDTH)  # of more than a mebibyte
        self.rare = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.wide(x))
        if float(x[0, 0]) > 0:
            hidden = hidden + self.rare(hidden.double()).float()
        return self.last(hidden).squeeze(1)


TASK = Task(
    model=Choosy,
    loss=F.mse_loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
    train=TensorDataset(INPUTS, TARGETS),
)


def train(world: World, written: str, memory_bytes: int | None) -> list[Any]:
    """Losses, and at the first worker the model."""
    spec = parse_strategy(written)
    strategy, replica = make_strategy(spec, world, WORKERS), Replica(TASK)
    setting = Setting(
        world=world,
        conduct=spec.conduct(Cluster(workers=WORKERS), WORKERS),
        extent=Extent(total_steps=STEPS),
        company=Company(report=lambda line: None),
        memory_bytes=memory_bytes,
        clip_norm=0.1,
    )
    strategy.open(replica, setting)
    replica.train_mode()
    mine = slice(2 * world.global_rank, 2 * world.global_rank + 2)
    part = Part(world.global_rank, lambda: iter([((INPUTS[mine], TARGETS[mine]), 2.0, 2)]), 2.0 * WORKERS)
    losses = [strategy.take(Work(number, (part,), 0)).result().loss for number in range(1, STEPS + 1)]
    model = {name: tensor.sum().item() for name, tensor in strategy.model_stream(replica).tensors}
    strategy.close()
    return [losses, model]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_limit_of_memory_changes_no_bit(stage: int) -> None:
    """With one, each worker keeps its part, and what it needs passes through the group."""
    assert {float(INPUTS[2 * worker, 0]) > 0 for worker in range(WORKERS)} == {False, True}, (
        "some use the rare layer"
    )
    written = f"sharded:stage={stage}"
    shared = in_processes(WORKERS, lambda world: train(world, written, None))
    apart = in_processes(WORKERS, lambda world: train(world, written, 1 << 50))
    losses = shared[0][0]
    assert losses[-1] < losses[0]
    for kept, other in zip(shared, apart, strict=True):
        assert kept[0] == losses
        if stage > 1:
            assert kept == other
        else:  # a gradient that is computed in its place is rounded otherwise
            assert kept[0] == pytest.approx(other[0], rel=1e-3)


def test_what_a_line_shares_is_known_beforehand() -> None:
    sizes = [100, 5000, 4000]

    def share(world: World) -> list[int]:
        group = open_group("memory", Setting(world=world, conduct=Conduct(fills=even_fills(2, 2))))
        segments = [group.share(row_regions(sizes, 2, stage)) for stage in (1, 3)]
        return [0 if segment is None else segment.nbytes for segment in segments]

    expected = [row_bytes(sizes, 2, 1), row_bytes(sizes, 2, 3)]
    assert in_processes(2, share) == [expected] * 2
    assert expected == [3 * 12288, 12288 + 2 * 12288]  # in pages: all of each, or two of the largest
