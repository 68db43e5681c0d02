"""K-fold splits: every sample tested on once, classes spread, and a task that trains one fold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import shoal
from shoal.datasets import KFold, Stream
from shoal.datasets.folds import with_fold
from shoal.errors import SpecError
from shoal.spec import Fold, Job


@given(st.integers(2, 60), st.integers(2, 10), st.integers(0, 5))
def test_every_sample_is_tested_on_once_and_trained_on_elsewhere(length: int, folds: int, seed: int) -> None:
    if folds > length:
        with pytest.raises(SpecError, match="fewer folds"):
            KFold(range(length), folds, seed)
        return
    pairs = KFold(range(length), folds, seed)
    tested = [sample for _, test in pairs for sample in test]
    assert len(pairs) == folds and sorted(tested) == list(range(length))
    for train, test in pairs:
        assert sorted([*train, *test]) == list(range(length))
    sizes = [len(test) for _, test in pairs]
    assert max(sizes) - min(sizes) <= 1


def test_the_split_depends_on_the_seed_alone() -> None:
    tests = [list(KFold(range(40), 4, seed)[1][1]) for seed in (0, 0, 1)]
    assert tests[0] == tests[1] != tests[2]
    assert tests[0] != sorted(range(40))[10:20]


@given(st.lists(st.sampled_from("abc"), min_size=5, max_size=80), st.integers(2, 5))
def test_classes_are_spread_over_the_folds(labels: list[str], folds: int) -> None:
    counts = [
        Counter(labels[sample] for sample in test) for _, test in KFold(range(len(labels)), folds, 1, labels)
    ]
    for name in set(labels):
        of_class = [count[name] for count in counts]
        assert max(of_class) - min(of_class) <= 1


def test_what_cannot_be_split() -> None:
    with pytest.raises(SpecError, match="stratify needs one label for each of the 6"):
        KFold(range(6), 2, stratify=[0, 1])
    with pytest.raises(SpecError, match="forward only"):
        KFold(Stream([0], lambda shard: range(4), [4]), 2)
    with pytest.raises(SpecError, match="at least 2"):
        KFold(range(6), 1)


@pytest.mark.parametrize("text", ["0/5", "6/5", "1/1", "2", "a/b", "-1/5", "2/5/6", ""])
def test_folds_that_cannot_be(text: str) -> None:
    with pytest.raises(SpecError, match="written like 2/5"):
        Fold.parse(text)
    with pytest.raises(SpecError, match="written like 2/5"):
        Job(target="x.py", overrides={"fold": text})


def make_task(**fields: object) -> shoal.Task:
    rows = TensorDataset(torch.arange(30.0).view(30, 1), torch.arange(30) % 3)
    return shoal.Task(
        model=lambda: None,
        optimizer=lambda params: None,
        loss=lambda a, b: a,
        **{"train": lambda: rows, "test": [1, 2], **fields},
    )


def test_a_task_of_one_fold_trains_on_the_rest_and_tests_on_it() -> None:
    tasks = [with_fold(make_task(), Fold.parse(f"{number}/5")) for number in range(1, 6)]
    tested = [int(x) for task in tasks for x, _ in task.dataset("test")]
    assert sorted(tested) == list(range(30))
    train, test = tasks[1].dataset("train"), tasks[1].dataset("test")
    assert {int(x) for x, _ in train} == set(range(30)) - {int(x) for x, _ in test}
    other_seed = with_fold(replace(make_task(), seed=9), Fold.parse("2/5"))
    assert [int(x) for x, _ in other_seed.dataset("test")] == [int(x) for x, _ in test]


def test_weights_and_labels_go_with_their_samples() -> None:
    weights = np.arange(30.0) + 1
    task = with_fold(make_task(sampler=shoal.Weighted(weights)), Fold.parse("3/5"))
    numbers = [int(x) for x, _ in task.dataset("train")]
    assert isinstance(task.sampler, shoal.Weighted) and task.sampler.weights.tolist() == weights[numbers].tolist()
    task = with_fold(make_task(sampler=shoal.Stratified(torch.arange(30) % 3)), Fold.parse("3/5"))
    assert isinstance(task.sampler, shoal.Stratified)
    assert task.sampler.labels.tolist() == [int(y) for _, y in task.dataset("train")]
    assert Counter(int(y) for _, y in task.dataset("test")) == {0: 2, 1: 2, 2: 2}
    with pytest.raises(SpecError, match="sampler of your own"):
        with_fold(make_task(sampler=lambda epoch, seed: range(30)), Fold.parse("1/2"))
