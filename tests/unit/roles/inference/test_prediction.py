"""Batches go round the lanes, whoever has their outputs; each is brought once, by one who has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.comm.desk_words import ONLY
from shoal.roles.inference.batches import InputBatch
from shoal.roles.inference.prediction import predicted_apart, predicted_together

BATCH, LENGTH = 4, 18
NUM_BATCHES = 5


class OneOfMany:
    """The strategy of one process: which lanes it computes, whether it gets their outputs, who brings them."""

    def __init__(self, lanes: tuple[int, ...], writers: tuple[int, ...], *, has_output: bool = True) -> None:
        self._lanes, self._writers, self._has_output = lanes, writers, has_output
        self.inferred: list[list[int]] = []
        self.serials: list[int] = []

    def exchange(self, serial: int, shape: tuple[int, int], fill: Callable[[torch.Tensor, int], None]) -> Any:
        assert shape == (len(self._writers), 1)
        self.serials.append(serial)
        for lane in self._lanes:
            fill(torch.zeros(shape, dtype=torch.float64), lane)
        return torch.tensor(self._writers, dtype=torch.float64)[:, None]

    def infer(self, replica: Any, inputs: torch.Tensor) -> Any:
        assert not torch.is_grad_enabled()
        self.inferred.append(inputs.tolist())
        return 10 * inputs if self._has_output else None


class Numbered:
    """Batches of numbers; of those that nobody waits for, some are empty."""

    total = NUM_BATCHES

    def __init__(self, empty: tuple[int, ...] = ()) -> None:
        self._empty = empty

    def take(self, number: int, *, waits: bool = True) -> InputBatch | None:
        if number >= NUM_BATCHES:
            return None
        start, end = number * BATCH, min((number + 1) * BATCH, LENGTH)
        if number in self._empty:
            return InputBatch(None, 0, start)
        return InputBatch(torch.arange(start, end), end - start, end)


def together(
    strategy: OneOfMany, rank: int, lanes: int, first: int = 0, empty: tuple[int, ...] = ()
) -> dict[int, list[int]]:
    """What this process brings, by batch."""
    made = predicted_together(Numbered(empty), strategy, None, first, lanes, rank)  # type: ignore[arg-type]
    return {one.number: one.rows[ONLY].tolist() for one in made}


def rows_of_batch(number: int) -> list[int]:
    return [10 * sample for sample in range(BATCH * number, min(BATCH * (number + 1), LENGTH))]


def test_each_process_with_the_whole_model_has_its_own_batches() -> None:
    second = OneOfMany(lanes=(1,), writers=(0, 1))
    made = list(predicted_apart(Numbered(), second, None, 1, 2))  # type: ignore[arg-type]
    assert {one.number: one.rows[ONLY].tolist() for one in made} == {n: rows_of_batch(n) for n in (1, 3)}
    assert [one.batch.end for one in made] == [8, 16]
    assert second.serials == [1], "it meets the others at the end alone"
    assert len(second.inferred) == 2


def test_where_all_take_part_in_each_pass_the_last_may_be_for_nothing() -> None:
    second = OneOfMany(lanes=(1,), writers=(0, 1))
    assert together(second, rank=1, lanes=2) == {number: rows_of_batch(number) for number in (1, 3)}
    assert second.serials == [1, 2, 3]
    assert len(second.inferred) == 3 and second.inferred[-1] == [16, 17]


def test_a_stream_that_pauses_leaves_lanes_without_a_batch() -> None:
    second = OneOfMany(lanes=(1,), writers=(0, 1))
    assert together(second, rank=1, lanes=2, empty=(1,)) == {3: rows_of_batch(3)}
    assert second.inferred[0] == [0, 1, 2, 3], "the first batch of the round, for nothing"


def test_what_was_empty_for_an_attempt_before_is_passed_over() -> None:
    only = OneOfMany(lanes=(0,), writers=(0,))
    assert together(only, rank=0, lanes=1, first=2, empty=(2, 3)) == {4: rows_of_batch(4)}
    assert only.serials == [1]


def test_others_begin_where_rows_are_missing() -> None:
    only = OneOfMany(lanes=(0,), writers=(0,))
    assert together(only, rank=0, lanes=1, first=3) == {number: rows_of_batch(number) for number in (3, 4)}
    assert only.serials == [1, 2]


def test_of_those_that_have_an_output_one_brings_it() -> None:
    assert together(OneOfMany(lanes=(0,), writers=(0,)), rank=0, lanes=1).keys() == set(range(5))
    assert not together(OneOfMany(lanes=(0,), writers=(0,)), rank=1, lanes=1)
    without = OneOfMany(lanes=(0,), writers=(1,), has_output=False)
    assert not together(without, rank=0, lanes=1)
    assert len(without.inferred) == NUM_BATCHES, "it takes part in all of them"
