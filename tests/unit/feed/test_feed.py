"""From sample numbers to batches, for every kind of data set and batch."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from shoal.feed.feed import Feed
from shoal.ledger import Cut
from shoal.spec import Task

INPUTS = torch.arange(20.0).view(10, 2)
TARGETS = torch.arange(10)
PAIRS = [(INPUTS[number], int(TARGETS[number])) for number in range(10)]
SAMPLES = np.array([7, 2, 5])


class Bulk:
    """Reads many samples at once, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return len(PAIRS)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("samples are read at once")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.asked.append(indices)
        return [PAIRS[index] for index in indices]


class Batch(NamedTuple):
    inputs: torch.Tensor
    target: torch.Tensor


def make_feed(dataset: Any, numerics: str = "task", **fields: Any) -> Feed:
    task = Task(model=lambda: None, optimizer=lambda params: None, loss=lambda a, b: a, train=dataset, **fields)
    return Feed(task, dataset, numerics=numerics)


@pytest.mark.parametrize(
    "dataset",
    [TensorDataset(INPUTS, TARGETS), PAIRS, Bulk(), Subset(TensorDataset(INPUTS, TARGETS), range(10))],
    ids=["tensors", "list", "bulk", "subset"],
)
def test_every_kind_of_data_set_gives_the_same_batch(dataset: Any) -> None:
    inputs, target = make_feed(dataset).batch(SAMPLES)
    assert torch.equal(inputs, INPUTS[[7, 2, 5]])
    assert torch.equal(target, TARGETS[[7, 2, 5]])


def test_bulk_readers_are_asked_once_per_batch() -> None:
    bulk = Bulk()
    make_feed(bulk).batch(SAMPLES)
    assert bulk.asked == [[7, 2, 5]]


def test_collate_makes_the_batch_even_of_plain_tensors() -> None:
    feed = make_feed(TensorDataset(INPUTS, TARGETS), collate=lambda rows: ("collated", [int(y) for _, y in rows]))
    assert feed.batch(SAMPLES) == ("collated", [7, 2, 5])


def test_named_and_several_inputs() -> None:
    inputs, target = make_feed([({"x": x, "y": x + 1}, t) for x, t in PAIRS]).batch(SAMPLES)
    assert inputs.keys() == {"x", "y"} and torch.equal(inputs["y"], INPUTS[SAMPLES] + 1)
    (first, second), _ = make_feed([((x, x * 2), t) for x, t in PAIRS]).batch(SAMPLES)
    assert torch.equal(first * 2, second) and torch.equal(target, TARGETS[SAMPLES])


def test_double_precision_reaches_every_float_and_nothing_else() -> None:
    rows = [({"x": x, "more": [x]}, t, "text") for x, t in PAIRS]
    named, target, text = make_feed(rows, "float64").batch(SAMPLES)
    assert named["x"].dtype == named["more"][0].dtype == torch.float64
    assert target.dtype == torch.int64 and list(text) == ["text"] * 3
    batch = make_feed([Batch(x, torch.tensor(t)) for x, t in PAIRS], "float64").batch(SAMPLES)
    assert isinstance(batch, Batch) and batch.inputs.dtype == torch.float64


def test_a_part_is_read_when_asked_for_and_may_be_read_again() -> None:
    bulk = Bulk()
    part = make_feed(bulk).part(Cut(1, SAMPLES, 8), seed=0, step=3)
    assert not bulk.asked and part.slot == 1 and part.total_weight == 8.0
    for _ in range(2):
        ((_, weight, _),) = part.load()
        assert weight == 3.0
    assert len(bulk.asked) == 2


@pytest.mark.parametrize(("accumulate", "sizes"), [(1, [3]), (2, [2, 1]), (5, [1, 1, 1])])
def test_accumulation_cuts_a_part_and_leaves_out_empty_pieces(accumulate: int, sizes: list[int]) -> None:
    part = make_feed(PAIRS, accumulate=accumulate).part(Cut(0, SAMPLES, 3), seed=0, step=1)
    assert [weight for _, weight, _ in part.load()] == [float(size) for size in sizes]


def test_an_empty_part_has_no_batches() -> None:
    assert list(make_feed(PAIRS).part(Cut(0, SAMPLES[:0], 3), seed=0, step=1).load()) == []


def test_weights_of_ones_own_are_not_known_beforehand() -> None:
    part = make_feed(PAIRS, weight=lambda batch: batch[1].sum()).part(Cut(0, SAMPLES, 3), seed=0, step=1)
    assert part.total_weight is None
    assert [weight for _, weight, _ in part.load()] == [14.0]


def test_augmentation_is_keyed_by_seed_step_and_slot() -> None:
    class Noisy:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> tuple[float, float]:
            return random.random(), float(np.random.rand())

    feed = make_feed(Noisy())

    def read(slot: int, seed: int, step: int) -> list[Any]:
        ((batch, *_),) = feed.part(Cut(slot, SAMPLES, 3), seed=seed, step=step).load()
        return [column.tolist() for column in batch]

    assert read(0, 1, 1) == read(0, 1, 1)
    keys = [(0, 1, 1), (1, 1, 1), (0, 2, 1), (0, 1, 2)]
    assert len({str(read(*key)) for key in keys}) == len(keys)
