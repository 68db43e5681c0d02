"""An optimizer's state that only it understands: taken apart, kept where others see it, put together again."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.errors import PeerLost, ProtocolError
from shoal.model.blueprint import Blueprint, model_size
from shoal.model.optimizer.kinds import StateSchema, settings_of, tried_on_copies
from shoal.model.optimizer.whole_state import StateImage, by_name, put_together, take_apart
from shoal.model.replica import Replica
from shoal.spec import Conduct, Data, Task, World
from shoal.strategies.base import Company, Setting
from shoal.strategies.data.shared import SharedState, arena_grid, cut_of_grid
from shoal.strategies.data.sizes import size_of_run
from shoal.strategies.data.whole_journal import WholeJournal


class Collector(torch.optim.Optimizer):
    """Keeps what one may think of: tensors of other types, lists, numbers, nothing, and what is no parameter's."""

    def __init__(self, params, *, factor: float) -> None:
        super().__init__(params, {"lr": 0.1})
        self.factor = factor

    @torch.no_grad()
    def step(self, closure=None):
        self.state["all"] = {"words": ("a", 1.5)}
        for group in self.param_groups:
            group["pace"] = group.get("pace", 1.0) * 0.9
            for param in (p for p in group["params"] if p.grad is not None):
                kept = self.state[param]
                kept["past"] = [*kept.get("past", []), param.grad * self.factor][-2:]
                kept["narrow"] = param.grad.to(torch.bfloat16)
                kept["steps"] = kept.get("steps", 0) + 1
                kept["none"] = None
                param.sub_(sum(kept["past"]) / kept["steps"], alpha=group["lr"] * group["pace"])


class Odd(torch.optim.SGD):
    """Keeps what nobody can write down."""

    def step(self, closure=None):
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["odd"] = object()


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(4, 3))


def task(make: Callable[..., torch.optim.Optimizer]) -> Task:
    data = TensorDataset(torch.randn(4, 2, 3, 3), torch.zeros(4, dtype=torch.int64))
    return Task(model=model, loss=F.cross_entropy, optimizer=make, train=data)


MAKERS = {
    "Collector": lambda params: Collector(params, factor=0.5),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "groups": lambda params: torch.optim.Adafactor([{"params": [p]} for p in params], lr=0.01),
}


def fill_gradients(replica: Replica, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in replica.trained.values():
        param.grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator))


def assert_same(left: torch.optim.Optimizer, right: torch.optim.Optimizer) -> None:
    plain, tensors = take_apart(left)
    other, others = take_apart(right)
    assert plain == other
    for one, two in zip(tensors, others, strict=True):
        assert one.dtype == two.dtype and one.stride() == two.stride() and torch.equal(one, two)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_was_taken_apart_is_put_together(make) -> None:
    one, two = Replica(task(make)), Replica(task(make))
    for step in (1, 2, 3):
        fill_gradients(one, step)
        one.optimizer.step()
    image = StateImage(torch.zeros(StateImage.nbytes_for(one.optimizer), dtype=torch.uint8))
    assert image.write(one.optimizer, 3, ["beside", 0.1])
    assert image.read(two.optimizer) == (3, ["beside", 0.1])
    assert_same(one.optimizer, two.optimizer)


def test_names_are_given_to_the_tensors_of_parameters() -> None:
    replica = Replica(task(MAKERS["Collector"]))
    fill_gradients(replica, 1)
    replica.optimizer.step()
    found = by_name(*take_apart(replica.optimizer), replica)
    assert set(found) == {f"{name}/narrow" for name in replica.trained}
    assert torch.equal(found["2.bias/narrow"], replica.trained["2.bias"].grad.to(torch.bfloat16))


def test_an_image_that_cannot_be_says_so() -> None:
    replica = Replica(task(MAKERS["Collector"]))
    fill_gradients(replica, 1)
    replica.optimizer.step()
    assert not StateImage(torch.zeros(128, dtype=torch.uint8)).write(replica.optimizer, 1), "too small"
    odd = Replica(task(lambda params: Odd(params, lr=0.1)))
    fill_gradients(odd, 1)
    odd.optimizer.step()
    assert StateImage.nbytes_for(odd.optimizer) == 0
    assert not StateImage(torch.zeros(1 << 16, dtype=torch.uint8)).write(odd.optimizer, 1)
    for strange in ([["param", 99], ["dict", []]], ["what"], [["param", 0], ["tensor", 7]]):
        with pytest.raises(ProtocolError):
            put_together(replica.optimizer, [strange], [])


def test_a_trial_moves_nothing() -> None:
    """Also where a scheduler has wrapped the optimizer's step."""
    scheduled = replace(
        task(MAKERS["Collector"]), scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    )
    replica = Replica(scheduled)
    before = {name: p.detach().clone() for name, p in replica.trained.items()}
    twin = tried_on_copies(replica.optimizer)
    assert twin is not None and len(take_apart(twin)[1]) == 2 * len(before)
    assert twin.factor == 0.5, "what the user's class has put there"
    assert not replica.optimizer.state
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in replica.trained.items())

    def fail(*_: object) -> None:
        raise RuntimeError("not here")

    replica.optimizer.__class__ = type("Failing", (Collector,), {"step": fail})
    assert tried_on_copies(replica.optimizer) is None


class Seat:
    """A process that has the first place: on the same memory a second one is a successor."""

    def __init__(self, fd: int, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.replica = Replica(task(make))
        self.lines: list[str] = []
        setting = Setting(
            world=World(arena_fd=fd),
            conduct=Conduct(fills=(range(1),)),
            company=Company(report=self.lines.append),
        )
        blueprint, grid = Blueprint.of(self.replica), arena_grid(list(self.replica.trained.values()), None)
        run = size_of_run(blueprint, self.replica.precision, setting.extent, 1, 1)
        regions = Data().segment_regions(model_size(blueprint), run, cut_of_grid(grid))
        self.shared = SharedState(self.replica, StateSchema((), ()), setting, regions)
        self.shared.map()
        self.shared.bind()
        self.journal = WholeJournal(self.shared, self.replica)

    def update(self, step: int) -> None:
        if self.journal.step == step:
            return
        with self.journal.updating(step):
            fill_gradients(self.replica, step)
            self.replica.optimizer.step()


def die_before(seat: Seat, step: int) -> None:
    del seat, step


def die_inside(seat: Seat, step: int) -> None:
    seat.journal._begin()
    next(iter(seat.replica.trained.values())).data.fill_(float(step))


def die_before_the_word(seat: Seat, step: int) -> None:
    """The image is all there, but nobody was told."""
    seat.update(step)
    seat.shared.counters[seat.shared.marks.progress[0]] -= 1


def die_after(seat: Seat, step: int) -> None:
    seat.update(step)


@pytest.mark.parametrize("die", [die_before, die_inside, die_before_the_word, die_after])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_successor_goes_on_with_the_same_bits(make, die) -> None:
    fds = [os.memfd_create("shoal-arena") for _ in range(2)]
    calm, seat = (Seat(fd, make) for fd in fds)
    for step in range(1, 6):
        calm.update(step)
        die(seat, step)
        seat = Seat(fds[1], make)
        seat.update(step)
        assert len(seat.lines) == (die in (die_inside, die_before_the_word))
        for one, two in zip(calm.shared.params, seat.shared.params, strict=True):
            assert torch.equal(one, two)
        assert_same(calm.replica.optimizer, seat.replica.optimizer)
        groups = [[settings_of(g) for g in one.replica.optimizer.param_groups] for one in (calm, seat)]
        assert groups[0] == groups[1]
    for fd in fds:
        os.close(fd)


def test_what_is_not_kept_goes_with_its_process() -> None:
    make: Callable[..., torch.optim.Optimizer] = lambda params: Odd(params, lr=0.1)  # noqa: E731
    fd = os.memfd_create("shoal-arena")
    Seat(fd, make)
    Seat(fd, make).update(1)  # before the first update nothing is lost
    with pytest.raises(PeerLost, match="the state of Odd, which only it held"):
        Seat(fd, make)
    os.close(fd)
