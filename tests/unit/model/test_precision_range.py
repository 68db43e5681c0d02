"""The loss scale, the range of half precision, and layers that leave it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.errors import Diverged, SpecError
from shoal.model.half_range import (
    FIRST_SCALE,
    MEASURED_EVERY,
    PATIENCE,
    STEPS_TO_DOUBLE,
    HalfState,
    Seen,
    is_measured,
    measure,
)
from shoal.model.precision import Precision, layers_of
from shoal.model.replica import Replica
from shoal.spec import Job, Task

GOOD, BAD = Seen(), Seen(not_finite=1.0)


def after(state: HalfState, *seen: Seen) -> HalfState:
    for each in seen:
        state = state.after(each)
    return state


def test_a_bad_gradient_halves_the_scale_and_many_good_ones_double_it() -> None:
    state = after(HalfState(), GOOD, BAD)
    assert (state.scale, state.skipped, state.good_steps) == (FIRST_SCALE / 2, 1, 0)
    almost = after(state, *[GOOD] * (STEPS_TO_DOUBLE - 1))
    assert almost.scale == FIRST_SCALE / 2
    assert after(almost, GOOD) == HalfState(scale=FIRST_SCALE, skipped=1)
    assert after(almost, BAD, GOOD).scale == FIRST_SCALE / 4


def test_a_layer_leaves_after_several_measurements_in_a_row_and_for_good() -> None:
    fits, leaves = Seen(nonzero=(10, 10), outside=(1, 1)), Seen(nonzero=(10, 10), outside=(1, 9))
    unmeasured = Seen(nonzero=(0, 0), outside=(0, 0))
    start = HalfState(streaks=(0, 0))
    assert after(start, leaves, leaves, fits, leaves).too_small == []
    left = after(start, leaves, unmeasured, leaves, *[unmeasured] * 5, *[leaves] * (PATIENCE - 2))
    assert left.too_small == [1]
    assert after(left, fits, fits).too_small == [1]
    assert HalfState.of(left.values) == left


def test_what_is_seen_of_gradients_adds_up() -> None:
    tiny = torch.tensor([1e-6, 1e-7, 0.0, 1.0])
    huge = torch.tensor([1e5, -1e6, 3.0])
    seen = measure([(0, tiny), (1, huge), (-1, torch.ones(3))], 2, in_full=True)
    assert seen == Seen(not_finite=0.0, nonzero=(3.0, 3.0), outside=(2.0, 2.0))
    unmeasured = measure([(0, tiny), (1, torch.tensor([float("inf")]))], 2, in_full=False)
    assert unmeasured == Seen(not_finite=1.0, nonzero=(0.0, 0.0), outside=(0.0, 0.0))
    assert Seen.of(seen.values) == seen
    assert is_measured(1) and is_measured(MEASURED_EVERY) and not is_measured(MEASURED_EVERY + 1)


def test_gradients_that_never_become_numbers_end_the_run() -> None:
    precision = Precision("fp16")
    with pytest.raises(Diverged, match="no numbers, even with a loss scale of"):
        for step in range(1, 100):
            assert not precision.conclude(step, BAD)
    assert precision.state.skipped > 30


class Tied(nn.Module):
    """Two layers that share a weight, one of its own, and a parameter outside of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)) + self.shift)


def test_a_layer_that_another_process_has_is_told_of_too() -> None:
    lines: list[str] = []
    precision = Precision("adaptive", layers=["0", "1"])
    precision.bind(nn.ModuleDict({"0": nn.Linear(4, 4)}), report=lines.append)
    for step in range(1, PATIENCE + 1):
        precision.conclude(step, Seen(nonzero=(20, 20), outside=(0, 20)))
    assert [line.partition(" ")[0] for line in lines] == precision.float32_layers == ["1"]


def test_a_layer_that_left_computes_in_float32_wherever_its_weight_is_used() -> None:
    module = Tied()
    layers = layers_of(module, [name for name, _ in module.named_parameters()])
    assert layers == ["first", "middle"]
    lines: list[str] = []
    precision = Precision("adaptive", layers=layers)
    precision.bind(module, report=lines.append)
    dtypes: dict[str, torch.dtype] = {}
    for name in ("first", "middle", "last"):
        getattr(module, name).register_forward_hook(lambda _, __, out, name=name: dtypes.update({name: out.dtype}))
    leaves = Seen(nonzero=(64, 72), outside=(64, 0))
    for step in range(1, PATIENCE + 1):
        with precision.autocast(step):
            module(torch.randn(2, 8)).sum().backward()
        assert set(dtypes.values()) == {torch.bfloat16}
        assert precision.conclude(step, leaves)
    with precision.autocast(PATIENCE + 1):
        module(torch.randn(2, 8)).sum().backward()
    assert dtypes == {"first": torch.float32, "middle": torch.bfloat16, "last": torch.float32}
    assert precision.facts()["float32_layers"] == ["first"]
    assert lines == ["first computes in float32: its gradients leave the range of half precision"]
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters())
    left = precision.state
    for state, expected in ((HalfState(streaks=(0, 0)), torch.bfloat16), (left, torch.float32)):
        precision.adopt(state)  # of another model of the same kind, and of this one again
        with precision.autocast(PATIENCE + 1):
            module(torch.randn(2, 8))
        assert dtypes == {"first": expected, "middle": torch.bfloat16, "last": expected}
    assert len(lines) == 1


def task(optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> Task:
    return Task(
        model=lambda: nn.Linear(4, 2),
        loss=F.cross_entropy,
        optimizer=lambda params: optimizer(params, lr=0.1),
        train=TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)),
    )


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(SpecError, match="LBFGS"):
        Replica(task(torch.optim.LBFGS), precision="fp16")
    with pytest.raises(SpecError, match="numerics=float64"):
        Job(target="a.py", numerics="float64", precision="bf16")
    with pytest.raises(SpecError, match="precision"):
        Job(target="a.py", precision="fp8")
    with pytest.raises(SpecError, match="schedule=1f1b"):
        Job(target="a.py", strategy="pipeline:schedule=zero-bubble", recompute=True)
