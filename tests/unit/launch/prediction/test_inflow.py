"""What comes in is cut into batches as it comes; who asks again gets the same, until its rows are there."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch

from shoal.comm.codec import decode
from shoal.errors import TaskError
from shoal.feed.sample_codec import unpack
from shoal.launch.prediction.inflow import Inflow, lines_from, values_from


def records(inflow: Inflow, number: int, most: int = 3, *, waits: bool = True) -> Any:
    batch = inflow.batch(number, most, waits=waits)
    return None if batch is None else list(batch.records)


def all_there(values: Iterable[Any]) -> Inflow:
    """What has come to its end before anybody asks: batches are as full as they can be."""
    inflow = Inflow(values_from(values))
    inflow._thread.join(10.0)
    return inflow


def test_full_batches_while_there_is_enough() -> None:
    inflow = all_there(range(7))
    assert [records(inflow, number) for number in range(4)] == [[0, 1, 2], [3, 4, 5], [6], None]
    assert records(inflow, 1) == [3, 4, 5], "another attempt asks for it again"
    assert inflow.batch(2, 3, waits=True).start == 6  # type: ignore[union-attr]
    inflow.forget(2)
    assert records(inflow, 2) == [6]
    assert records(inflow, 1) == [], "its rows are there"
    inflow.close()


def test_a_batch_whose_turn_has_not_come_is_cut_after_those_before_it() -> None:
    inflow = all_there(range(6))
    assert records(inflow, 1) == [3, 4, 5] and records(inflow, 0) == [0, 1, 2]
    inflow.close()


def test_an_input_that_pauses_is_not_waited_for() -> None:
    given: Queue[Any] = Queue()
    inflow = Inflow(values_from(iter(given.get, None)))
    given.put("first")
    assert records(inflow, 0) == ["first"], "it need not be full"
    assert records(inflow, 1, waits=False) == []
    given.put("second")
    given.put(None)
    assert records(inflow, 2) == ["second"]
    assert records(inflow, 3) is None
    inflow.close()


def test_who_waits_for_a_later_batch_holds_nobody_up() -> None:
    given: Queue[Any] = Queue()
    inflow = Inflow(values_from(iter(given.get, None)))
    later: Queue[Any] = Queue()
    thread = threading.Thread(target=lambda: later.put(records(inflow, 1)))
    thread.start()
    given.put("first")
    assert records(inflow, 0) == ["first"]
    assert later.empty()
    given.put("second")
    assert later.get(timeout=10.0) == ["second"]
    thread.join(10.0)
    given.put(None)
    inflow.close()


def test_lines_come_whole() -> None:
    reading, writing = os.pipe()
    inflow = Inflow(lines_from(reading))
    for text in (b"[1,", b"2]\n\n3,4\n5", b",6"):
        os.write(writing, text)
    os.close(writing)
    found, number = [], 0
    while (batch := records(inflow, number)) is not None:
        found += batch
        number += 1
    assert found == ["[1,2]", "3,4", "5,6"]
    assert inflow.source.encode(found) == [b"[1,2]\n3,4\n5,6"]
    inflow.close()
    os.close(reading)


def test_values_travel_as_they_are() -> None:
    given = [(torch.arange(3), {"a": np.float32(2.5)}), "text"]
    message = decode(values_from(given).encode(given))
    frames = list(message.frames)
    (tensor, named), text = (unpack(record, frames) for record in message.fields["records"])
    assert tensor.tolist() == [0, 1, 2] and named == {"a": 2.5} and text == "text"
    with pytest.raises(TaskError, match="predict: a value of the input holds a set"):
        values_from([]).encode([{1, 2}])


def test_what_the_source_raises_ends_it() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise OSError("the line is dead")

    inflow = Inflow(values_from(failing()))
    assert [records(inflow, number) for number in range(2)] == [[1], None]
    assert isinstance(inflow.error, OSError)
    inflow.close()


def test_an_input_without_end_can_be_left() -> None:
    inflow = Inflow(values_from(iter(int, 1)))
    assert set(records(inflow, 0)) == {0}
    inflow.close()
    inflow._thread.join(10.0)
    assert not inflow._thread.is_alive()
