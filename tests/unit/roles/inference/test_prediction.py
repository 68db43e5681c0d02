"""Batches go round the lanes, whoever has their outputs; each is written once, in order, by one who has it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from shoal.roles.inference.output import WritingOrder
from shoal.roles.inference.reading import Reading
from shoal.roles.inference.rows import ONLY
from shoal.roles.inference.saved_model import PredictionRounds
from shoal.spec import World

BATCH, LENGTH = 4, 18
NUM_BATCHES = 5


class OneOfMany:
    """The strategy of one process: which lanes it computes, whether it gets their outputs, who writes them."""

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


def run(strategy: OneOfMany, rank: int, lanes: int, *, together: bool) -> dict[int, list[int]]:
    """What this process writes, by batch."""

    def batch(samples: np.ndarray) -> tuple[torch.Tensor, None]:
        return torch.from_numpy(samples), None

    task: Any = SimpleNamespace(batch_size=BATCH)
    feed: Any = SimpleNamespace(batch=batch)
    replica: Any = None
    takes: Any = SimpleNamespace(of=lambda batch: batch[0])
    reading = Reading(
        task=task, replica=replica, feed=feed, length=LENGTH, takes=takes, example=lambda: batch(np.arange(BATCH))
    )
    assert reading.num_batches == NUM_BATCHES
    rounds = PredictionRounds(reading, strategy, rank, lanes, together=together)  # type: ignore[arg-type]
    found: dict[int, list[int]] = {}
    for first in range(0, NUM_BATCHES, lanes):
        found |= {number: rows[ONLY].tolist() for number, rows in rounds.take(first).items()}
    return found


def rows_of(number: int) -> list[int]:
    return [10 * sample for sample in range(BATCH * number, min(BATCH * (number + 1), LENGTH))]


def test_each_process_with_the_whole_model_has_its_own_batches() -> None:
    second = OneOfMany(lanes=(1,), writers=(0, 1))
    assert run(second, rank=1, lanes=2, together=False) == {number: rows_of(number) for number in (1, 3)}
    assert second.serials == [1, 2, 3]
    assert len(second.inferred) == 2, "there is no batch for it in the last round"


def test_where_all_take_part_in_each_pass_the_last_may_be_for_nothing() -> None:
    second = OneOfMany(lanes=(1,), writers=(0, 1))
    assert run(second, rank=1, lanes=2, together=True) == {number: rows_of(number) for number in (1, 3)}
    assert len(second.inferred) == 3 and second.inferred[-1] == [16, 17]


def test_of_those_that_have_an_output_one_writes_it() -> None:
    assert run(OneOfMany(lanes=(0,), writers=(0,)), rank=0, lanes=1, together=True).keys() == set(range(5))
    assert not run(OneOfMany(lanes=(0,), writers=(0,)), rank=1, lanes=1, together=True)
    without = OneOfMany(lanes=(0,), writers=(1,), has_output=False)
    assert not run(without, rank=0, lanes=1, together=True)
    assert len(without.inferred) == NUM_BATCHES, "it takes part in all of them"


def test_batches_are_written_in_order_whoever_comes_first() -> None:
    order, written = WritingOrder(World()), list[int]()

    def write(number: int) -> None:
        with order.of(number):
            written.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in (2, 1)]
    for thread in threads:
        thread.start()
    write(0)
    for thread in threads:
        thread.join(timeout=10.0)
    assert written == [0, 1, 2]
