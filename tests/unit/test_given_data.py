"""Data as people have it becomes sets that are read by number; what cannot be kept is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from shoal.datasets import Shipped
from shoal.datasets.arrays import Arrays
from shoal.datasets.folds import with_fold
from shoal.datasets.given import numbered
from shoal.errors import SpecError, TaskError
from shoal.feed.feed import Feed
from shoal.ledger import make_order
from shoal.roles.training.training import make_schedule
from shoal.spec import Fold, Stratified, Task

X = np.arange(40.0).reshape(20, 2)
Y = np.arange(20) % 3
PAIRS = TensorDataset(torch.from_numpy(X).float(), torch.from_numpy(Y))
SAMPLES = np.array([7, 2, 19])


def make(train: Any = PAIRS, **fields: Any) -> Task:
    usual = {"model": lambda: None, "optimizer": lambda params: None, "loss": lambda a, b: a}
    return Task(**{**usual, "train": train, **fields})


def batch_of(task: Task, samples: np.ndarray = SAMPLES) -> Any:
    given = numbered(task)
    return Feed(given, given.dataset("train")).batch(samples)


# Arrays.


def mapped(folder: Path) -> np.ndarray:
    np.save(folder / "x.npy", X)
    return np.load(folder / "x.npy", mmap_mode="r")


@pytest.mark.parametrize(
    "arrays",
    [
        lambda folder: (X, Y),
        lambda folder: (torch.from_numpy(X).float(), torch.from_numpy(Y)),
        lambda folder: (mapped(folder), Y),
        lambda folder: lambda: (X, Y),
        lambda folder: Arrays((X, Y)),
    ],
    ids=["numpy", "tensors", "mapped", "a function", "as it is read"],
)
def test_rows_of_arrays_are_samples(arrays: Callable[[Path], Any], tmp_path: Path) -> None:
    inputs, target = batch_of(make(arrays(tmp_path)))
    wanted_inputs, wanted_target = PAIRS[SAMPLES]
    assert inputs.dtype == torch.float32 and torch.equal(inputs, wanted_inputs)
    assert target.dtype == torch.int64 and torch.equal(target, wanted_target)


def test_tensors_keep_their_type_and_several_inputs_their_names() -> None:
    named, target = batch_of(make(({"x": torch.from_numpy(X), "half": X.astype(np.float16)}, Y)))
    assert named["x"].dtype == torch.float64 and named["half"].dtype == torch.float16
    (first, second), _ = batch_of(make(((X, X + 1), Y)))
    assert torch.equal(first + 1, second) and torch.equal(target, torch.from_numpy(Y)[SAMPLES])


def test_one_sample_and_collate() -> None:
    arrays = numbered(make((X, Y))).dataset("train")
    inputs, target = arrays[-1]
    assert len(arrays) == 20 and inputs.tolist() == [38.0, 39.0] and target.item() == 1
    with pytest.raises(IndexError, match="within 20 samples, found 20"):
        arrays[20]
    assert batch_of(make((X, Y), collate=lambda rows: [int(y) for _, y in rows]))[:2] == [1, 2]


def test_a_tuple_of_samples_is_none_of_arrays() -> None:
    samples = tuple((torch.ones(2), torch.tensor(number)) for number in range(20))
    assert numbered(make(samples)).train is samples


def test_arrays_are_folded_and_shipped() -> None:
    folded = with_fold(numbered(make((X, Y))), Fold.parse("1/4"))
    train, test = folded.dataset("train"), folded.dataset("test")
    found = [Feed(folded, part).batch(np.arange(len(part)))[0][:, 0] for part in (train, test)]
    assert sorted(torch.cat(found).tolist()) == X[:, 0].tolist() and len(test) == 5
    shipped = numbered(make(Shipped(lambda: (X, Y)))).train
    assert isinstance(shipped, Shipped) and isinstance(shipped(), Arrays)


def test_a_mapped_file_may_be_larger_than_memory(tmp_path: Path) -> None:
    rows = np.memmap(
        tmp_path / "rows", dtype=np.uint8, mode="w+", shape=(1 << 30, 64)
    )  # 64 GiB, hardly any on disk
    rows[1 << 29] = 7
    given = numbered(make((rows, np.broadcast_to(np.int64(1), 1 << 30)), batch_size=2))
    dataset = given.dataset("train")
    inputs, target = Feed(given, dataset).batch(np.array([1 << 29, 3]))
    assert inputs.tolist() == [[7] * 64, [0] * 64] and target.tolist() == [1, 1]
    assert dataset.is_mapped and make_order(given, dataset, 2).length == 1 << 30


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ((X, Y[:-1]), "the train set is arrays of 19 and 20 rows"),
        ((np.array(["a", "b"]), np.arange(2)), "holds an array of type <U1, which torch has no numbers for"),
        ((X[:0], Y[:0]), "the train set .Arrays. is empty"),
        ({"train": PAIRS, "test": PAIRS}, "the train set is a dict of 'train', 'test'; give one of its values"),
        (lambda: DataLoader(PAIRS), "train= is a function that makes a DataLoader"),
    ],
)
def test_what_is_no_data_set(train: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        numbered(make(train)).dataset("train")


# Named columns.


class Table:
    """As a Hugging Face data set: rows are dicts, of lists unless a format is set."""

    def __init__(self, columns: dict[str, list[Any]], kind: str | None = None) -> None:
        self._columns = columns
        self.column_names = list(columns)
        self.format = {"type": kind}

    def with_format(self, kind: str) -> Table:
        return Table(self._columns, kind)

    def __len__(self) -> int:
        return len(self._columns[self.column_names[0]])

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = {name: values[number] for name, values in self._columns.items()}
        return row if self.format["type"] is None else {name: torch.tensor(value) for name, value in row.items()}

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        return [self[number] for number in numbers]


TABLE = Table({"ids": [[n, n + 1] for n in range(20)], "mask": [[1, 0]] * 20, "label": list(range(20))})


def test_the_column_of_labels_is_the_target() -> None:
    inputs, target = batch_of(make(TABLE))
    assert inputs.keys() == {"ids", "mask"} and inputs["ids"].tolist() == [[7, 8], [2, 3], [19, 20]]
    assert target.tolist() == [7, 2, 19]
    alone, _ = batch_of(make(Table({"image": [[1.0]] * 20, "labels": [0] * 20})))
    assert torch.equal(alone, torch.ones(3, 1)), "a single input is the model's only argument"


def test_an_objective_gets_all_columns_and_collate_the_rows_as_they_are() -> None:
    whole = batch_of(make(TABLE, loss=None, objective=lambda model, batch: 0))
    assert whole.keys() == {"ids", "mask", "label"} and torch.equal(whole["label"], torch.tensor([7, 2, 19]))
    assert batch_of(make(TABLE, collate=lambda rows: (rows[0]["ids"], 0))) == ([7, 8], 0)


def test_columns_without_a_target_are_refused() -> None:
    with pytest.raises(TaskError, match="a batch is a dict of 'a', 'b', in which loss= finds no target"):
        batch_of(make({"a": X, "b": Y}))


# DataLoaders.


def stack(rows: list[Any]) -> Any:
    return torch.stack([x for x, _ in rows]), torch.tensor([int(y) for _, y in rows])


def said_by(loader: DataLoader[Any], **fields: Any) -> Task:
    return numbered(make(loader, **fields))


def test_what_a_loader_says() -> None:
    task = said_by(DataLoader(PAIRS, batch_size=6, shuffle=True, num_workers=2, collate_fn=stack, drop_last=True))
    assert task.train is PAIRS and (task.batch_size, task.loaders, task.collate) == (6, 2, stack)
    assert task.shuffle and task.sampler is None and task.drop_last
    schedule = make_schedule(task, PAIRS, 2, 2)
    assert (schedule.length, schedule.total_steps, schedule.smallest_batch) == (18, 3, 6)
    plain = said_by(DataLoader(PAIRS))
    assert (plain.batch_size, plain.shuffle, plain.loaders, plain.collate) == (1, False, 0, None)


def test_an_override_comes_last_and_a_task_may_say_the_same() -> None:
    loader = DataLoader(PAIRS, batch_size=6)
    assert numbered(make(loader), {"batch_size": 10, "loaders": 1}).batch_size == 10
    assert said_by(loader, batch_size=6).batch_size == 6
    assert said_by(loader, sampler=Stratified(Y)).sampler is not None, "the loader has said nothing of it"


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([0.0] * 15 + [1.0] * 5, 12),
        RandomSampler(PAIRS, replacement=True, num_samples=12),
        SubsetRandomSampler(range(8, 20)),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_torchs_samplers_follow_from_seed_and_epoch(sampler: Sampler[int]) -> None:
    loader = DataLoader(PAIRS, batch_size=4, sampler=sampler)
    orders = [make_order(said_by(loader, seed=seed), PAIRS, 4) for seed in (0, 0, 1)]
    epochs = [[order.samples(epoch, 0, order.length).tolist() for epoch in (0, 1)] for order in orders]
    assert orders[0].length == 12 and epochs[0] == epochs[1] != epochs[2] and epochs[0][0] != epochs[0][1]
    assert set(epochs[0][0]) <= (
        set(range(15, 20)) if isinstance(sampler, WeightedRandomSampler) else set(range(20))
    )


def test_a_sampler_for_several_processes_is_not_applied_twice() -> None:
    for shuffle in (True, False):
        sampler = DistributedSampler(PAIRS, num_replicas=2, rank=1, shuffle=shuffle)
        task = said_by(DataLoader(PAIRS, batch_size=4, sampler=sampler))
        assert task.shuffle is shuffle and sorted(make_order(task, PAIRS, 4).samples(0, 0, 20)) == list(range(20))


class Restless(Sampler[int]):
    """Draws from the generator that all share."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(20).tolist())


@pytest.mark.parametrize(
    ("loader", "fields", "message"),
    [
        ({"batch_size": 6}, {"batch_size": 8}, "batch_size=8, but the DataLoader has batch_size=6"),
        ({"batch_size": 6}, {"batch_size": 32}, "batch_size=32, but the DataLoader has batch_size=6"),
        ({"num_workers": 2}, {"loaders": 1}, "loaders=1, but the DataLoader has num_workers=2"),
        ({"collate_fn": stack}, {"collate": len}, "but the DataLoader has collate_fn="),
        ({"shuffle": True}, {"shuffle": False}, "shuffle=False and the DataLoader's RandomSampler both say"),
        ({"shuffle": True}, {"sampler": Stratified(Y)}, "sampler= and the DataLoader's RandomSampler both say"),
        ({"batch_size": None}, {}, "has batch_size=None, so its data set makes the batches"),
        ({"batch_sampler": [[0, 1]]}, {}, "a batch_sampler of its own .list."),
        ({"worker_init_fn": print, "num_workers": 1}, {}, "has a worker_init_fn"),
        ({"generator": torch.Generator(), "shuffle": True}, {}, "has a generator, but the order follows"),
    ],
)
def test_what_a_loader_says_that_cannot_be_kept(loader: dict, fields: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        said_by(DataLoader(PAIRS, **loader), **fields)


def test_a_plain_batch_sampler_is_understood() -> None:
    task = said_by(DataLoader(PAIRS, batch_sampler=BatchSampler(RandomSampler(PAIRS), 5, drop_last=False)))
    assert (task.batch_size, task.shuffle, task.drop_last) == (5, True, False)


def test_a_sampler_that_is_not_the_same_twice_is_refused() -> None:
    with pytest.raises(TaskError, match="sampler Restless gave two different orders for epoch 0"):
        make_order(said_by(DataLoader(PAIRS, sampler=Restless())), PAIRS, 4)


def test_a_loader_of_test_data_gives_its_data_set() -> None:
    assert said_by(DataLoader(PAIRS), test=DataLoader(PAIRS, batch_size=7, shuffle=True)).test is PAIRS
    for loader, message in (
        (DataLoader(PAIRS, drop_last=True), "is evaluated whole"),
        (DataLoader(PAIRS, sampler=SubsetRandomSampler(range(4))), "is evaluated whole"),
        (DataLoader(PAIRS, collate_fn=stack), "makes batches in another way"),
    ):
        with pytest.raises(TaskError, match=message):
            said_by(DataLoader(PAIRS), test=loader)


def test_dropping_the_last_batch_needs_one_that_is_left() -> None:
    with pytest.raises(TaskError, match="of 20 samples none is left at batch_size=32"):
        make_schedule(make(drop_last=True), PAIRS, 1, 1)
