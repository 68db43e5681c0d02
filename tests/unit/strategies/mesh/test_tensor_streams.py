"""Which norms become sequence-parallel, why others do not, and what that saves."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal.errors import SpecError
from shoal.layout.tensor_plan import TensorPlan, Way, Wishes
from shoal.model.replica import Replica
from shoal.strategies.mesh.tensor.observing import Inputs
from shoal.strategies.mesh.tensor.planning import make_plan
from shoal.strategies.mesh.tensor.recording import record
from shoal.strategies.mesh.tensor.residual import with_streams
from shoal.strategies.mesh.tensor.trial import Costs, CutTrial

WIDTH, LENGTH = 16, 8


def perceptron(width: int = 4 * WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH))


class Before(nn.Module):
    """Normalises, computes, adds to what it was given."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm, mix: bool = False) -> None:
        super().__init__()
        self.norm, self.feed, self.mix = norm(WIDTH), perceptron(), mix

    def forward(self, x: Tensor) -> Tensor:
        found = x + self.feed(self.norm(x))
        return found - found.mean(1, keepdim=True) + found.cumsum(1).flip(1) if self.mix else found


class After(Before):
    """Normalises the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.feed(x))


class Pooled(nn.Module):
    """Gives less than it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(WIDTH), perceptron()

    def forward(self, x: Tensor) -> Tensor:
        return self.feed(self.norm(x)).mean(1)


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.last, self.head = nn.Sequential(*blocks), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.blocks(x)))


def planned(
    module: Callable[[], nn.Module],
    count: int = 2,
    norms: str = "auto",
    plan: str = "auto",
    length: int = LENGTH,
    saves_memory: bool = True,
) -> TensorPlan:
    inputs = torch.randn(4, length, WIDTH)
    task = shoal.Task(
        model=module,
        loss=lambda output, target: output.square().mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(inputs, inputs),
        batch_size=2,
        epochs=1,
    )
    replica = Replica(task, sample=lambda: (inputs[:2], inputs[:2]))
    recording, wishes = record(replica), Wishes.parse(plan)
    made = make_plan(replica.module, recording, count, wishes)
    return with_streams(made, replica.module, recording, wishes, norms, saves_memory=saves_memory)


@pytest.mark.parametrize("block", [Before, After, lambda: Before(nn.RMSNorm)])
def test_norms_of_residual_blocks_and_what_follows_them(block: Callable[[], nn.Module]) -> None:
    plan = planned(lambda: Stack(block(), block()))
    assert plan.sequence_norms == ["blocks.0.norm", "blocks.1.norm", "last"]
    cuts = [cut for region in plan.regions for cut in region.cuts]
    assert [cut.layer for cut in cuts if cut.in_rows] == [cut.layer for cut in cuts if cut.way is Way.ROW]
    assert "blocks.*.norm (2), last: sequence-parallel: 3 norms" in plan.lines()


@pytest.mark.parametrize(
    ("module", "args", "reason"),
    [
        (lambda: Stack(Before()), {"norms": "replicated"}, "norms=replicated"),
        (lambda: Stack(Before()), {"saves_memory": False}, "without a limit of memory that is faster"),
        (lambda: Stack(Before()), {"count": 8, "length": 4}, "sequence of 4 is shorter than the workers"),
        (lambda: Stack(Before(mix=True)), {}, r"its block would (send \d+% more|keep no less)"),
        (lambda: Stack(Before()), {"length": 5, "count": 4}, r"its block would send \d+% more"),
        (lambda: nn.Sequential(Pooled(), nn.Linear(WIDTH, 4)), {}, "gives another shape than it is given"),
    ],
)
def test_norms_that_stay_replicated_are_told_why(
    module: Callable[[], nn.Module], args: dict[str, object], reason: str
) -> None:
    plan = planned(module, **args)
    assert not plan.streams and not any(cut.in_rows for region in plan.regions for cut in region.cuts)
    name = "0.norm" if "0.norm" in plan.whole else "blocks.0.norm"
    assert re.fullmatch(f"LayerNorm is not cut; .*{reason}.*", plan.whole[name]), plan.whole[name]


def test_wished_norms_need_not_pay() -> None:
    assert planned(lambda: Stack(Before()), 4, norms="sequence", length=5).sequence_norms
    layers = "blocks.*.feed.0=column;blocks.*.feed.2=row"
    by_hand = planned(lambda: Stack(Before(), Before()), plan=f"{layers};blocks.1.norm=sequence")
    assert by_hand.sequence_norms == ["blocks.1.norm", "last"]
    assert by_hand.whole["blocks.0.norm"] == "LayerNorm is not cut; the plan does not name it"
    with pytest.raises(SpecError, match=r"head=sequence cannot be: it is no norm of a block with cut layers"):
        planned(lambda: Stack(Before()), plan=f"{layers};head=sequence")


def test_a_retreat_gives_up_streams_first() -> None:
    plan = planned(lambda: Stack(Before()))
    first = next(plan.retreats())
    assert first.cut_layers == plan.cut_layers and not first.streams
    assert set(first.whole) == {*plan.whole, "blocks.0.norm", "last"}


def test_less_is_kept_and_no_more_is_sent() -> None:
    """But for the sums of the norm's own gradients."""
    plan = planned(lambda: Stack(Before()))
    regions = [region for region in plan.regions if region.block == "blocks.0.feed"]
    plain = [replace(one, cuts=tuple(replace(cut, in_rows=False) for cut in one.cuts)) for one in regions]
    inputs: Inputs = ((torch.randn(2, LENGTH, WIDTH),), {})
    trial = CutTrial("blocks.0", Before(), inputs, 2)
    before, after = trial.costs(plain), trial.costs(regions, WIDTH)
    assert isinstance(before, Costs) and isinstance(after, Costs)
    activation = 2 * LENGTH * WIDTH * 4
    assert before.kept_bytes - after.kept_bytes >= activation / 2  # half of what the norm is given
    assert after.sent_bytes == before.sent_bytes + 2 * WIDTH * 4
    assert after.in_rows >= {"norm"}
