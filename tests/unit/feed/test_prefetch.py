"""Loading ahead: the same bits, the loader's time hidden, and no further ahead than it takes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

import shoal
from shoal.feed.feed import Feed
from shoal.feed.prefetch import Ahead, Loaded, WantedPart
from shoal.ledger import Cut

GUARD_S = 20.0


def parts(count: int = 100, slot: int = 0) -> list[WantedPart]:
    return [WantedPart(step, slot, np.arange(step, step + 2), key=step) for step in range(1, count + 1)]


class Loader:
    """Remembers its loads; those of later steps than it is let wait."""

    def __init__(self, last: int = 10**6) -> None:
        self.done: list[int] = []
        self.threads: set[str] = set()
        self._last = last
        self._changed = threading.Condition()

    def let(self, last: int) -> None:
        with self._changed:
            self._last = last
            self._changed.notify_all()

    def __call__(self, wanted: WantedPart) -> Loaded:
        with self._changed:
            assert self._changed.wait_for(lambda: wanted.step <= self._last, GUARD_S)
            self.done.append(wanted.step)
            self.threads.add(threading.current_thread().name)
            self._changed.notify_all()
        return [(wanted.samples.tolist(), float(wanted.key))]

    def await_done(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.done) >= count, GUARD_S)


@pytest.fixture
def ahead() -> Iterator[Callable[..., Ahead]]:
    made: list[Ahead] = []

    def make(loader: Callable[[WantedPart], Loaded], most: int = 8) -> Ahead:
        made.append(Ahead(loader, most))
        return made[-1]

    yield make
    for one in made:
        one.close()


def await_ready(one: Ahead, count: int) -> None:
    """Until so many parts lie ready."""
    deadline = time.monotonic() + GUARD_S
    while len(one._ready) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def await_waits(one: Ahead, count: int) -> None:
    """Until so many steps had to wait."""
    deadline = time.monotonic() + GUARD_S
    while one.waits < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_step_that_computes_longer_than_the_loader_loads_never_waits(ahead: Any) -> None:
    loader = Loader()
    one = ahead(loader)
    wanted = parts(50)
    one.foresee(wanted, 1)
    for number, part in enumerate(wanted):
        one.foresee(wanted[number:], part.step)
        await_ready(one, 1)  # this is the step before, still computing
        assert one.take(part) == [(part.samples.tolist(), float(part.key))]
    assert one.waits == 0 and one.depth == 1
    assert loader.done == list(range(1, 51)) and loader.threads == {"shoal-prefetch"}


def test_room_grows_while_steps_wait_and_shrinks_while_the_loader_does(ahead: Any) -> None:
    loader = Loader(last=0)
    one = ahead(loader, 4)
    wanted = parts(200)
    one.foresee(wanted, 1)
    for number in range(6):
        taker = threading.Thread(target=one.take, args=(wanted[number],))
        taker.start()
        await_waits(one, number + 1)  # the step asks before the loader is let
        loader.let(number + 1)
        taker.join(GUARD_S)
    assert one.depth == 4
    loader.let(200)
    waits = one.waits
    for part in wanted[6:90]:
        await_ready(one, one.depth)
        one.take(part)
    assert one.depth == 1 and one.waits == waits


def test_no_more_is_loaded_than_there_is_room_for(ahead: Any) -> None:
    loader = Loader()
    one = ahead(loader)
    one.foresee(parts(), 1)
    loader.await_done(1)
    await_ready(one, 1)
    assert loader.done == [1]


def test_what_was_not_foreseen_is_loaded_at_once_and_what_is_old_is_dropped(ahead: Any) -> None:
    loader = Loader()
    one = ahead(loader)
    one.foresee(parts(), 1)
    await_ready(one, 1)
    other = WantedPart(1, 0, np.array([7, 8, 9]), key=5)  # the same slot has other samples now
    assert one.take(other) == [([7, 8, 9], 5.0)]
    one.foresee(parts()[4:], 5)
    await_ready(one, 2)
    assert {step for step, _, _ in one._ready} == {5, 6}


def test_an_error_is_raised_where_the_part_is_asked_for(ahead: Any) -> None:
    def load(wanted: WantedPart) -> Loaded:
        if wanted.step == 2:
            raise ZeroDivisionError("sample 7 is bad")
        return []

    one = ahead(load)
    one.foresee(parts(3), 1)
    assert one.take(parts()[0]) == []
    with pytest.raises(ZeroDivisionError, match="sample 7"):
        one.take(parts()[1])
    assert one.take(parts()[2]) == []


class Slow:
    """Takes a while for each batch, and may draw random numbers."""

    def __init__(self, draw: Callable[[], float] = lambda: 0.0, pause_s: float = 0.002) -> None:
        self.draw = draw
        self.pause_s = pause_s

    def __len__(self) -> int:
        return 64

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        if self.pause_s:  # even a sleep of no time lets others run first
            time.sleep(self.pause_s)
        return [(torch.full((3,), number + self.draw()), torch.tensor(number % 2)) for number in numbers]

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]


class SlowModel(nn.Module):
    """Computes for longer than the data takes to load."""

    def __init__(self, pause_s: float, dropout: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(dropout), nn.Linear(8, 2))
        self.pause_s = pause_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pause_s:  # even a sleep of no time lets others run first
            time.sleep(self.pause_s)
        return self.layers(x)


def task(dataset: Any, pause_s: float = 0.0, **fields: Any) -> shoal.Task:
    return shoal.Task(
        model=lambda: SlowModel(pause_s),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        train=dataset,
        **{"batch_size": 4, "epochs": 2, **fields},
    )


def trained(given: shoal.Task, slots: int = 1) -> tuple[list[torch.Tensor], bool, int]:
    """The parameters, whether it loaded ahead, and how often steps waited."""
    with shoal.Trainer(given, slots=slots) as trainer:
        feed, seen = trainer._training._feed, []
        close = feed.close
        feed.close = lambda: (seen.append((feed.is_ahead, feed.waits)), close())  # type: ignore[method-assign]
        trainer.fit()
        return [p.detach().clone() for p in trainer.model.parameters()], *seen[0]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("draw", [lambda: 0.0, random.random, np.random.rand], ids=["plain", "python", "numpy"])
def test_loading_ahead_changes_no_bit(draw: Any, accumulate: int) -> None:
    usual, was_ahead, _ = trained(task(Slow(draw), prefetch=0, accumulate=accumulate), slots=2)
    assert not was_ahead
    ahead, was_ahead, _ = trained(task(Slow(draw), accumulate=accumulate), slots=2)
    assert was_ahead and all(map(torch.equal, usual, ahead))


def test_a_test_set_that_draws_disturbs_nothing_and_is_not_disturbed() -> None:
    results = []
    for prefetch in (0, 8):
        given = task(Slow(random.random), test=Slow(random.random), prefetch=prefetch, evaluate_every=5)
        with shoal.Trainer(given) as trainer:
            results.append((trainer.fit().results, [p.tolist() for p in trainer.model.parameters()]))
    assert results[0] == results[1]


@pytest.mark.alone
def test_the_loaders_time_is_hidden() -> None:
    # 32 steps of 10 ms and more; loads of 2 ms have to be asked for before the step before is over.
    _, was_ahead, waits = trained(task(Slow(), pause_s=0.01))
    assert was_ahead and waits <= 8
    _, was_ahead, waits = trained(task(Slow(pause_s=0.05)))
    assert was_ahead and waits >= 20, "a loader slower than the model is waited for"


@pytest.mark.parametrize(
    "dataset",
    [
        Slow(lambda: float(torch.rand(()))),
        Slow(pause_s=0.0),
        TensorDataset(torch.rand(64, 3), torch.arange(64) % 2),
        Subset(TensorDataset(torch.rand(64, 3), torch.arange(64) % 2), range(64)),
    ],
    ids=["draws from the model's generator", "quick", "tensors", "a view of tensors"],
)
def test_where_it_would_cost_or_change_something_nothing_is_loaded_ahead(dataset: Any) -> None:
    assert not trained(task(dataset))[1]


def test_a_model_that_draws_from_pythons_generator_keeps_it_for_itself() -> None:
    class Drawing(SlowModel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * random.random()

    usual, _, _ = trained(shoal.Task(**{**vars(task(Slow(), prefetch=0)), "model": lambda: Drawing(0.0)}))
    ahead, was_ahead, _ = trained(shoal.Task(**{**vars(task(Slow())), "model": lambda: Drawing(0.0)}))
    assert not was_ahead and all(map(torch.equal, usual, ahead))


def test_a_view_of_tensors_is_read_at_once() -> None:
    rows = TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10))
    feed = Feed(task(rows), Subset(rows, [9, 4, 2]))
    inputs, target = feed.batch(np.array([2, 0]))
    assert target.tolist() == [2, 9] and torch.equal(inputs, rows.tensors[0][[2, 9]])
    ((batch, weight, _),) = feed.part(Cut(0, np.array([1]), 1), seed=0, step=1).load()
    assert batch[1].tolist() == [4] and weight == 1.0
