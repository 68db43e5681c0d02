"""Data that can only be gone through: numbered by position, the same in every process, wherever one begins."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from helpers.forked import in_processes
from shoal.datasets import Counted, InParts, KFold, Shipped
from shoal.datasets.folds import with_fold
from shoal.datasets.given import numbered
from shoal.datasets.iterated import Iterated
from shoal.errors import SpecError, TaskError
from shoal.feed.feed import Feed
from shoal.ledger import Cut, make_order
from shoal.roles.training.training import make_schedule
from shoal.spec import Fold, Task, Weighted


class Counting(IterableDataset[str]):
    """Says which pass and which sample of it, and counts what is opened and read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.epoch = 0
        self.opened = 0
        self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[str]:
        self.opened += 1
        for number in range(self.count):
            self.read += 1
            yield f"{self.epoch}.{number}"


class Sized(Counting):
    def __init__(self, count: int, length: int | None = None) -> None:
        super().__init__(count)
        self.length = count if length is None else length

    def __len__(self) -> int:
        return self.length


class Skipping(Counting):
    """Can begin anywhere."""

    def skip(self, count: int) -> Iterator[str]:
        self.opened += 1
        for number in range(count, self.count):
            self.read += 1
            yield f"{self.epoch}.{number}"


class Drawing(IterableDataset[float]):
    """Samples that come from all the generators there are."""

    def __iter__(self) -> Iterator[float]:
        for _ in range(10):
            yield random.random() + float(np.random.rand()) + float(torch.rand(()))


def iterated(source: Any, keep: int = 4, seed: int = 0) -> Iterated:
    return Iterated(source, seed=seed, keep=keep)


def make(train: Any, **fields: Any) -> Task:
    usual = {"model": lambda: None, "optimizer": lambda params: None, "loss": lambda a, b: a, "batch_size": 4}
    return Task(**{**usual, "train": train, **fields})


def named(first: int, last: int, count: int) -> list[str]:
    return [f"{number // count}.{number % count}" for number in range(first, last)]


@pytest.mark.parametrize("source", [Sized, Counting, Skipping])
def test_numbers_go_on_from_pass_to_pass(source: type[Counting]) -> None:
    data = source(10)
    found = iterated(data)
    for start in range(0, 30, 5):
        assert found.__getitems__(list(range(start, start + 5))) == named(start, start + 5, 10)
    assert (data.opened, data.read) == (3, 30), "each pass is opened once, and nothing is read twice"


@pytest.mark.parametrize("source", [Sized, Counting, Skipping])
@pytest.mark.parametrize("start", [0, 3, 10, 17, 29])
def test_who_comes_late_or_goes_back_finds_the_same(source: type[Counting], start: int) -> None:
    found = iterated(source(10))
    assert found.__getitems__(list(range(start, start + 4))) == named(start, start + 4, 10)
    assert found[start + 9] == named(start + 9, start + 10, 10)[0]
    assert found.__getitems__([start, start + 2]) == [named(n, n + 1, 10)[0] for n in (start, start + 2)]


def test_what_can_skip_is_not_read_and_a_pass_that_is_over_is_not_opened() -> None:
    skipping = Skipping(1000)
    assert iterated(skipping)[900] == "0.900" and skipping.read == 1
    sized = Sized(1000)
    assert iterated(sized)[3003] == "3.3" and (sized.opened, sized.read) == (1, 4)


def test_what_was_read_last_is_at_hand() -> None:
    data = Counting(100)
    found = iterated(data, keep=8)
    found.__getitems__(list(range(8, 12)))
    assert found.__getitems__([4, 5, 6, 7]) == named(4, 8, 100) and data.opened == 1, "another part of that step"
    found.__getitems__([0])
    assert data.opened == 2


def test_what_is_drawn_follows_from_seed_and_pass_and_leaves_others_alone() -> None:
    torch.manual_seed(7)
    random.seed(7)
    before = (random.getstate(), torch.get_rng_state())
    whole = iterated(Drawing()).__getitems__(list(range(20)))
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    late = iterated(Drawing())
    random.random()
    assert late.__getitems__([13, 14]) == whole[13:15], "another process, which draws besides and begins elsewhere"
    assert len(set(whole)) == 20 and iterated(Drawing(), seed=1)[0] != whole[0]


def test_a_forked_process_opens_its_own() -> None:
    data = Counting(20)
    found = iterated(data)
    found[5]
    assert in_processes(1, lambda world: [found[6], data.opened]) == [["0.6", 2]]
    assert found[6] == "0.6" and data.opened == 1


@pytest.mark.parametrize(("count", "told"), [(8, "only 8"), (12, "11 or more")])
def test_a_length_that_is_not_kept_is_told(count: int, told: str) -> None:
    with pytest.raises(
        TaskError, match=rf"data set .Sized. has a length of 10, but a pass through it yields {told}"
    ):
        iterated(Sized(count, 10)).__getitems__(list(range(10)))


def test_a_source_that_raises_does_so_again_for_who_asks_again() -> None:
    class Torn(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise OSError("disk on fire")

    found = iterated(Torn())
    for _ in range(2):
        with pytest.raises(OSError, match="disk on fire"):
            found[1]
    assert found[0] == 1


def test_nothing_at_all_is_refused() -> None:
    with pytest.raises(TaskError, match=r"data set .Counting. yields no samples"):
        iterated(Counting(0))[0]


# As a task's data.


def test_a_length_makes_epochs() -> None:
    task = numbered(make(Sized(10), epochs=3))
    schedule = make_schedule(task, task.train, 2, 2)
    assert (schedule.length, schedule.total_steps) == (10, 9)
    assert [cut.samples.tolist() for cut in schedule.cuts(4, range(2))] == [[10, 11], [12, 13]]
    assert [cut.samples.tolist() for cut in schedule.cuts(6, range(2))] == [[18], [19]]


def test_without_a_length_max_steps_says_when_it_is_over() -> None:
    task = numbered(make(Counting(10), max_steps=7))
    schedule = make_schedule(task, task.train, 2, 2)
    assert schedule.total_steps == 7 and schedule.smallest_batch == 4 and schedule.samples_after(7) == 28
    read = [
        sample
        for step in range(1, 8)
        for cut in schedule.cuts(step, range(2))
        for sample in task.train.__getitems__(cut.samples.tolist())
    ]
    assert read == named(0, 28, 10)
    longer = numbered(make(Counting(10), max_steps=9))
    assert make_schedule(longer, longer.train, 2, 2).length == schedule.length, (
        "a resumed run may go on for longer"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "the train set has no length, so epochs=1 does not say how long to train; set max_steps="),
        (
            {"max_steps": 3, "epochs": 2},
            "has no length, so epochs=2 does not say how long to train; set max_steps= and no epochs",
        ),
        ({"max_steps": 3, "sampler": Weighted([1.0] * 10)}, "the train set is read forward only"),
    ],
)
def test_what_needs_a_length_or_an_index(fields: dict, message: str) -> None:
    task = numbered(make(Counting(10), **fields))
    with pytest.raises(TaskError, match=message):
        make_order(task, task.train, 4)


def test_evaluations_must_end_and_folds_jump() -> None:
    with pytest.raises(TaskError, match=r"the test set .Counting. has no length, so nobody could say when"):
        numbered(make(Sized(10), test=Counting(10)))
    with pytest.raises(TaskError, match=r"the train set .Sized. has a length of 0"):
        numbered(make(Sized(0)))
    with pytest.raises(SpecError, match="forward only"):
        with_fold(numbered(make(Sized(10))), Fold.parse("1/2")).dataset("train")
    with pytest.raises(SpecError, match="forward only"):
        KFold(iterated(Sized(10)))
    assert isinstance(numbered(make(Shipped(lambda: Sized(10)))).train(), Iterated)


@pytest.mark.parametrize("source", [Counting, Skipping])
def test_counted_data_has_epochs(source: type[Counting]) -> None:
    data = source(10)
    task = numbered(make(Counted(data), epochs=2))
    assert make_schedule(task, task.train, 1, 1).total_steps == 6 and data.read == 10
    assert task.train.__getitems__([16, 17]) == ["1.6", "1.7"]
    assert data.read == 10 + (2 if source is Skipping else 8)
    with pytest.raises(AttributeError, match="Counted has no 'sample'"):
        Counted(data).sample  # noqa: B018


def test_a_generator_function_is_called_for_every_pass() -> None:
    def rows() -> Iterator[int]:
        yield from range(3)

    found = numbered(make(rows, max_steps=2)).dataset("train")
    assert found.length is None and found.__getitems__([1, 2, 3, 4]) == [1, 2, 0, 1]


def test_a_loader_of_an_iterable() -> None:
    task = numbered(make(DataLoader(Sized(10), batch_size=5, num_workers=1), batch_size=5))
    assert isinstance(task.train, Iterated) and (task.batch_size, task.loaders) == (5, 1)


# In parts.


class Split(IterableDataset[str]):
    """Looks who reads it, and notes who did."""

    def __init__(self) -> None:
        self.readers: list[int] = []

    def __iter__(self) -> Iterator[str]:
        reader = get_worker_info()
        first, step = (0, 1) if reader is None else (reader.id, reader.num_workers)
        self.readers.append(first)
        yield from (f"{first}:{number}" for number in range(first, 10, step))


class Sharded(Counting):
    """As Hugging Face's: another object for each part."""

    def shard(self, num_shards: int, index: int) -> list[str]:
        return [f"{index}:{number}" for number in range(index, 10, num_shards)]


@pytest.mark.parametrize("source", [Split(), Sharded(10)])
def test_parts_are_numbered_by_turns_and_go_on_by_themselves(source: Any) -> None:
    parted = numbered(make(InParts(source, 4), max_steps=5)).train
    assert parted.__getitems__([0, 1, 2, 3, 4]) == ["0:0", "1:1", "2:2", "3:3", "0:4"]
    assert parted.__getitems__([8, 10]) == ["0:8", "2:2"], "that part had two samples"
    assert get_worker_info() is None


def test_a_slot_opens_its_own_parts_alone() -> None:
    source = Split()
    task = numbered(make(InParts(source, 4), max_steps=5, batch_size=8))
    schedule = make_schedule(task, task.train, 2, 2)
    cuts = [[cut.samples.tolist() for cut in schedule.cuts(step, range(2))] for step in (1, 2)]
    assert cuts == [[[0, 4, 1, 5], [2, 6, 3, 7]], [[8, 12, 9, 13], [10, 14, 11, 15]]]
    for step in (1, 2):
        (cut,) = schedule.cuts(step, (1,))
        task.train.__getitems__(cut.samples.tolist())
    assert set(source.readers) == {2, 3}
    order = schedule.order
    whole = order.samples(0, 0, 24)
    assert sorted(whole.tolist()) == list(range(24)), "each once"
    assert all(order.samples(0, a, b).tolist() == whole[a:b].tolist() for a in range(25) for b in range(a, 25))


@pytest.mark.parametrize("loaders", [0, 2])
def test_a_feed_reads_the_same_here_and_in_processes(loaders: int) -> None:
    task = numbered(make(Drawing(), collate=lambda rows: (torch.tensor(rows), os.getpid()), max_steps=6))
    feed = Feed(task, task.train, processes=loaders)
    parts = [Cut(0, np.arange(4 * step, 4 * step + 4), 4) for step in range(6)]
    try:
        found = []
        for step, part in enumerate(parts, 1):
            feed.foresee(enumerate(parts[step - 1 :], step), 0, step)
            ((batch, _, _),) = feed.part(part, 0, step).load()
            found += batch[0].tolist()
            assert (batch[1] == os.getpid()) == (not loaders) and not feed.is_ahead
    finally:
        feed.close()
    assert found == torch.tensor(iterated(Drawing()).__getitems__(list(range(24)))).tolist()
