"""Places of a run, each with a model of its own: which process hosts which of them changes no bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.errors import PeerLost
from shoal.feed.parts import LoadedBatch, Part
from shoal.model.replica import Replica
from shoal.spec import Cluster, Task, World, parse_strategy
from shoal.step.work import Work
from shoal.strategies import make_strategy
from shoal.strategies.average.arena import ArenaAverage
from shoal.strategies.base import Company, Extent, Setting

BATCH, PLACES, STEPS = 12, 2, 12
INPUTS = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(4))
TARGETS = torch.arange(BATCH) % 3


class Fading(torch.optim.Optimizer):
    """A user's own: looks at whole parameters, and changes a setting of its own with every step."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    kept = self.state[param].setdefault("sum", torch.zeros_like(param))
                    kept.add_(param.grad / (1 + param.grad.norm()))
                    param.sub_(kept, alpha=group["lr"] / group["steps"])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.05),
    "Fading": lambda params: Fading(params, lr=0.5),
}
CASES = [
    ("average:every=4,outer=nesterov", "AdamW"),
    ("average:every=4", "Fading"),
    ("average:every=4,with=ring", "AdamW", "adaptive"),
    ("average:every=4,combine=ensemble", "AdamW"),
    ("average:every=4,init=own", "Fading"),
    ("average:every=2,clients=4,partition=own,scaffold=on", "AdamW"),
]


class Supplied:
    """Where the data comes from."""

    def work(self, step: int, slots: Iterable[int], *, apart: bool = False) -> Work:
        return Work(step, tuple(Part(slot, rows(slot), float(BATCH)) for slot in slots), 7)


class Process:
    """One of a run's."""

    def __init__(self, case: tuple[str, ...], fd: int, places: tuple[int, ...], role: str = "worker") -> None:
        written, optimizer, *asked = case
        precision = asked[0] if asked else "fp32"
        task = Task(
            model=lambda: nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)),
            loss=F.cross_entropy,
            optimizer=OPTIMIZERS[optimizer],
            scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 1, 0.8),
            train=TensorDataset(INPUTS, TARGETS),
            clip_norm=1.0,
        )
        spec = parse_strategy(written)
        self.world = World(
            role=role, arena_fd=fd, world_size=PLACES, places=places, global_rank=min(places, default=0)
        )
        self.replica = Replica(task, precision=precision)
        self.setting = Setting(
            world=self.world,
            conduct=spec.conduct(Cluster(workers=PLACES), PLACES),
            extent=Extent(total_steps=STEPS, batch_size=BATCH, tables=2, table_rows=2, table_columns=2),
            company=Company(report=lambda line: None),
            supply=Supplied(),
            clip_norm=task.clip_norm,
        )
        self.strategy: Any = make_strategy(spec, self.world, PLACES)
        assert isinstance(self.strategy, ArenaAverage)

    def open(self) -> Process:
        self.replica.train_mode()
        self.strategy.open(self.replica, self.setting)
        return self

    def host(self, *places: int) -> int:
        """Places come or go."""
        self.world = self.world.hosting(places, self.world.generation + 1)
        return self.strategy.handover.reform(self.world)

    def step(self, number: int) -> Any:
        found = self.strategy.take(Supplied().work(number, self.world.places))
        self.replica.advance(float("nan"))
        return found

    def go_on(self, first: int, last: int = STEPS) -> list[float]:
        """What these steps come to."""
        taken = [self.step(number) for number in range(first, last + 1)]
        return [each.result().loss for each in taken]

    def look(self, serial: int) -> list[list[float]]:
        def fill(table: torch.Tensor, place: int) -> None:
            table[place] = next(iter(self.replica.module.parameters())).detach().double().sum()

        return self.strategy.exchange(serial, (2, 2), fill).tolist()

    def found(self) -> dict[str, list[float]]:
        streams = (self.strategy.model_stream(self.replica), self.strategy.state_stream())
        return {name: value.tolist() for stream in streams for name, value in stream.tensors}


def rows(slot: int) -> Callable[[], Iterator[LoadedBatch]]:
    first, last = BATCH * slot // PLACES, BATCH * (slot + 1) // PLACES
    return lambda: iter([((INPUTS[first:last], TARGETS[first:last]), float(last - first), last - first)])


def both(*acts: Callable[[], Any]) -> list[Any]:
    """What processes do at one time."""
    with ThreadPoolExecutor(len(acts)) as threads:
        return [each.result(60) for each in [threads.submit(act) for act in acts]]


@pytest.fixture
def fds() -> Iterator[list[int]]:
    made = [os.memfd_create("shoal-arena") for _ in range(2)]
    yield made
    for fd in made:
        os.close(fd)


Outcome = tuple[list[float], dict[str, list[float]]]


def whole_run(process: Process) -> Outcome:
    process.open()
    return process.go_on(1), process.found()


def undisturbed(case: tuple[str, ...], fd: int) -> Outcome:
    """Each place in a process of its own."""
    first, second = Process(case, fd, (0,)), Process(case, fd, (1,))  # drawn from one generator: not at one time
    return both(lambda: whole_run(first), lambda: whole_run(second))[0]


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_one_process_comes_to_what_two_do(case: tuple[str, ...], fds: list[int]) -> None:
    assert whole_run(Process(case, fds[1], (0, 1))) == undisturbed(case, fds[0])


@pytest.mark.parametrize("died_after", [0, 1, 3])
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_who_takes_a_place_over_takes_its_steps_again(
    case: tuple[str, ...], died_after: int, fds: list[int]
) -> None:
    """In the middle of a round, each step with the learning rate that it had."""
    process, dead = Process(case, fds[1], (0,)), Process(case, fds[1], (1,))
    both(process.open, dead.open)
    for number in range(1, died_after + 1):
        dead.step(number)
    taken = [process.step(number) for number in (1, 2, 3)]
    assert not any(each.is_known for each in taken) and not process.strategy.may_release
    assert process.host(0, 1) == 3
    taken += [process.step(number) for number in range(4, STEPS + 1)]
    losses = [each.result().loss for each in taken]
    assert (losses, process.found()) == undisturbed(case, fds[0])


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_a_place_leaves_where_all_have_met(case: tuple[str, ...], fds: list[int]) -> None:
    """It goes to a process that has just come, and back again when that one dies in the middle of a round."""
    process = Process(case, fds[1], (0, 1)).open()
    border = 4
    losses = process.go_on(1, border)
    assert process.strategy.may_release and process.host(0) == border
    comer = Process(case, fds[1], (), role="spare").open()
    comer.replica.advance_over(losses)
    assert comer.host(1) == border
    comer.step(border + 1)
    taken = [process.step(border + 1), process.step(border + 2)]
    process.host(0, 1)
    taken += [process.step(number) for number in range(border + 3, STEPS + 1)]
    losses += [each.result().loss for each in taken]
    assert (losses, process.found()) == undisturbed(case, fds[0])


def test_a_look_in_the_middle_of_a_round_fills_all_rows(fds: list[int]) -> None:
    case = CASES[0]

    def look_twice(process: Process) -> list[Any]:
        process.open().go_on(1, 2)
        found = [process.look(1)]
        process.go_on(3, 5)
        return [*found, process.look(2), process.go_on(6), process.found()]

    first, second = Process(case, fds[0], (0,)), Process(case, fds[0], (1,))
    expected, _ = both(lambda: look_twice(first), lambda: look_twice(second))
    assert look_twice(Process(case, fds[1], (0, 1))) == expected
    assert all(value for table in expected[:2] for row in table for value in row)


@pytest.mark.parametrize("case", CASES[:-1], ids=", ".join)  # clients do not meet in the middle of a round
def test_who_follows_finds_places_at_different_meetings(case: tuple[str, ...], fds: list[int]) -> None:
    """Their process died while it left what they had, for somebody who looked in the middle of a round."""

    class Killed(BaseException):
        """It is gone."""

    dead, leave = Process(case, fds[1], (0, 1)).open(), ArenaAverage._leave
    losses = dead.go_on(1, 4)
    dead.step(5)

    def leave_one(strategy: Any, place: int, meeting: int) -> None:
        if place == 1:
            raise Killed
        leave(strategy, place, meeting)

    with patch.object(ArenaAverage, "_leave", leave_one), pytest.raises(Killed):
        dead.look(1)
    comer = Process(case, fds[1], (), role="spare").open()
    comer.replica.advance_over(losses)
    assert comer.host(0, 1) == 4
    losses += comer.go_on(5, 5)
    table = comer.look(1)

    calm = Process(case, fds[0], (0, 1)).open()
    assert calm.go_on(1, 5) == losses and calm.look(1) == table
    assert comer.go_on(6) == calm.go_on(6) and comer.found() == calm.found()


def test_an_optimizer_whose_state_goes_with_its_process_is_told_of(fds: list[int]) -> None:
    process, dead = Process(CASES[0], fds[1], (0,)), Process(CASES[0], fds[1], (1,))
    both(process.open, dead.open)
    parameter = next(iter(dead.replica.trained.values()))

    def to_the_border(each: Process) -> None:
        each.step(1)
        if each is dead:
            each.replica.optimizer.state[parameter]["mine"] = object()
        for number in (2, 3, 4):
            each.step(number)

    both(lambda: to_the_border(process), lambda: to_the_border(dead))
    with pytest.raises(PeerLost, match=r"Worker 1 is gone, and with it the state of AdamW"):
        process.host(0, 1)
