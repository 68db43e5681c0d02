"""Steps that a device takes unasked: in half precision they come to what plain steps come to, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.errors import Diverged
from shoal.feed.parts import LoadedBatch, Part
from shoal.model.half_range import FIRST_SCALE, STEPS_TO_DOUBLE, HalfState, Seen
from shoal.model.precision import Precision
from shoal.model.replica import Replica
from shoal.spec import Cluster, Data, Task, World
from shoal.step.compute import EagerCompute, compute_of
from shoal.step.device_scale import DeviceScale, ScaledSums, step_unless
from shoal.step.device_step import DeviceStep
from shoal.step.unasked import UnaskedSteps
from shoal.step.update import Update
from shoal.step.work import Work
from shoal.strategies.base import Company, Setting
from shoal.strategies.data.single import SingleProcess

Make = Callable[[list[nn.Parameter]], optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "fused AdamW": lambda params: optim.AdamW(params, lr=1e-2, fused=True),
    "fused SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda params: optim.AdamW(params, lr=1e-2, foreach=True),
    "SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "RMSprop": lambda params: optim.RMSprop(params, lr=1e-2, momentum=0.9),
    "NAdam": lambda params: optim.NAdam(params, lr=1e-2),
    "Rprop": lambda params: optim.Rprop(params, lr=1e-2),
}
BATCH, STEPS, BAD_STEPS = 8, 10, (5, 6, 9)
GENERATOR = torch.Generator().manual_seed(4)
INPUTS = torch.randn(BATCH, 4, generator=GENERATOR)
TARGETS = torch.randint(0, 3, (BATCH,), generator=GENERATOR)
PART = Part(0, lambda: iter(()), None)


def loss(scores: Tensor, target: Tensor) -> Tensor:
    """Targets past the classes ask for a loss that no half-precision gradient can hold."""
    return F.cross_entropy(scores.float(), target % 3) * (1 + (target >= 3).any() * 1e6)


def replica(make: Make, precision: str = "fp16") -> Replica:
    torch.manual_seed(1)
    task = Task(
        model=lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)),
        loss=loss,
        optimizer=make,
        train=TensorDataset(INPUTS, TARGETS),
        clip_norm=0.5,
    )
    made = Replica(task, precision=precision)
    made.train_mode()
    return made


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    """The second of two is bad where one is to be."""
    bad = TARGETS[6:] + 3 * (step in BAD_STEPS)
    return [(INPUTS[:6], TARGETS[:6]), (INPUTS[6:], bad)]


def loaded(step: int) -> Part:
    def load() -> Iterator[LoadedBatch]:
        for batch in batches(step):
            yield batch, float(len(batch[1])), len(batch[1])

    return Part(0, load, float(BATCH))


def state_of(trained: Replica) -> list[Tensor]:
    kept = [value for state in trained.optimizer.state.values() for value in state.values()]
    tensors = [*trained.module.parameters(), *(value for value in kept if isinstance(value, Tensor))]
    return [tensor.detach().clone() for tensor in tensors]


def are_equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def plain_steps(trained: Replica) -> Callable[[int], float]:
    strategy = SingleProcess()
    conduct = Data().conduct(Cluster())
    company = Company(report=lambda line: None)
    strategy.open(trained, Setting(world=World(), conduct=conduct, company=company, clip_norm=0.5))
    return lambda step: strategy.take(Work(step, (loaded(step),), 0)).result().loss


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_device_steps_have_the_bits_of_plain_ones_and_skip_what_they_skip(name: str) -> None:
    plain, found = replica(OPTIMIZERS[name]), replica(OPTIMIZERS[name])
    take = plain_steps(plain)
    compute = compute_of(found)
    assert isinstance(compute, EagerCompute)
    device, take_first = DeviceStep(found, compute, Update(found, 0.5)), plain_steps(found)
    take(1), take_first(1)  # as captured steps begin: there the optimizer makes what it keeps
    assert device.scale is not None
    device.scale.send()
    shares = [torch.tensor(len(target) / BATCH) for _, target in batches(1)]
    for step in range(2, STEPS + 1):
        before, expected = state_of(found), take(step)
        for param in found.trained.values():
            param.grad = None
        told = device.run(batches(step), shares, step)
        sums = ScaledSums(Work(step, (PART,), 0), PART, device.scale)
        sums.is_sent(told, None, [6.0, 2.0])
        assert sums.resolve().mean_loss == pytest.approx(expected, rel=1e-6)
        assert are_equal(state_of(found), state_of(plain)), step
        assert are_equal(state_of(found), before) == (step in BAD_STEPS), step
        assert found.precision.state == plain.precision.state
    assert found.precision.facts()["skipped_steps"] == len(BAD_STEPS)
    assert found.precision.scale == FIRST_SCALE / 2 ** len(BAD_STEPS)


@pytest.mark.parametrize("name", ["fused AdamW", "fused SGD"])
def test_plain_steps_that_nobody_waits_for_have_the_bits_of_those_that_are_looked_at(name: str) -> None:
    """Also where the first step is skipped, in which the optimizer would make what it keeps."""
    plain, found = replica(OPTIMIZERS[name]), replica(OPTIMIZERS[name])
    take, unasked = plain_steps(plain), UnaskedSteps(found, eager(found), Update(found, 0.5))
    for step in (BAD_STEPS[0], *range(2, STEPS + 1)):
        for param in found.trained.values():
            param.grad = None
        sums = unasked.take(Work(step, (PART,), 0), loaded(step)).resolve()
        assert sums.mean_loss == pytest.approx(take(step), rel=1e-6) and sums.samples == BATCH
        assert all(map(torch.equal, found.module.parameters(), plain.module.parameters())), step
        assert found.precision.state == plain.precision.state
    assert are_equal(state_of(found), state_of(plain))
    assert found.precision.facts()["skipped_steps"] == len(BAD_STEPS) + 1


def eager(trained: Replica) -> EagerCompute:
    compute = compute_of(trained)
    assert isinstance(compute, EagerCompute)
    return compute


def test_the_device_follows_the_rules_of_the_host() -> None:
    bad = {1, 2, 700, 701, 2703, 2703 + STEPS_TO_DOUBLE, 2704 + 2 * STEPS_TO_DOUBLE}
    scale, expected = DeviceScale(precision := Precision("fp16"), "cpu"), precision.state
    scale.send()
    for step in range(1, 3 * STEPS_TO_DOUBLE + 1000):
        expected = expected.after(Seen(not_finite=float(step in bad)))
        scale.advance(torch.tensor(float(step in bad)))
        assert HalfState.of(scale.values.tolist()) == expected, step
    assert expected.skipped == len(bad)
    assert expected.scale > FIRST_SCALE / 2 ** len(bad)  # it has doubled, too


def test_what_the_host_has_changed_is_sent_and_what_it_has_heard_is_not() -> None:
    scale = DeviceScale(precision := Precision("fp16"), "cpu")
    precision.conclude(1, Seen(not_finite=1.0))
    scale.send()
    assert scale.values.tolist() == [FIRST_SCALE / 2, 0, 1]
    opened = []
    for step in (2, 3):  # two are open at once: the host is behind, and sends nothing
        scale.advance(torch.tensor(1.0))
        scale.send()
        opened.append(ScaledSums(Work(step, (PART,), 0), PART, scale))
        opened[-1].is_sent(torch.cat([torch.tensor([0.5]).double(), scale.values]), None, [4.0])
    assert precision.state.skipped == 1
    scale.settle()
    assert (precision.scale, precision.state.skipped) == (FIRST_SCALE / 8, 3)
    assert opened[0].resolve().mean_loss == 0.5 and precision.state.skipped == 3
    precision.conclude(4, Seen())
    scale.send()
    assert scale.values.tolist() == [FIRST_SCALE / 8, 1, 3]


def test_a_scale_that_ends_on_the_device_ends_the_run() -> None:
    scale = DeviceScale(precision := Precision("fp16"), "cpu")
    scale.send()
    with pytest.raises(Diverged, match="no numbers, even with a loss scale of"):
        for step in range(1, 100):
            scale.advance(torch.tensor(1.0))
            sums = ScaledSums(Work(step, (PART,), 0), PART, scale)
            sums.is_sent(torch.cat([torch.ones(1).double(), scale.values]), None, [1.0])
            sums.resolve()
    assert precision.state.skipped > 30


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_element_spoils_a_step_and_an_optimizer_that_skips_keeps_no_trace(value: float) -> None:
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    scale = DeviceScale(Precision("fp16"), "cpu")
    scale.send()
    optimizer = optim.SGD(params, lr=0.5, momentum=0.9, foreach=True)
    for gradient, is_spoilt in ((1.0, 0.0), (value, 1.0)):
        for param in params:
            param.grad = torch.full_like(param, FIRST_SCALE)
        assert params[1].grad is not None
        params[1].grad[1] = gradient * FIRST_SCALE
        spoilt = scale.unscale(param.grad for param in params if param.grad is not None)
        assert spoilt.item() == is_spoilt
        step_unless(spoilt, optimizer)
        assert all(torch.equal(param.detach(), torch.full_like(param, 0.5)) for param in params)
        assert all(
            torch.equal(optimizer.state[param]["momentum_buffer"], torch.ones_like(param)) for param in params
        )
