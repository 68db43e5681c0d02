"""Data sets that are read forward only: few reads, and shards held to their declared lengths."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.datasets import Stream
from shoal.errors import SpecError, TaskError
from shoal.ledger.streaming import StreamOrder

LENGTHS = {"a": 10, "b": 3, "c": 17}


class Shards:
    """Opens shards of text, and counts what is opened and read."""

    def __init__(self, lengths: dict[str, int] | None = None) -> None:
        self.lengths = lengths or LENGTHS
        self.opened: list[str] = []
        self.read = 0

    def __call__(self, name: str) -> Iterator[str]:
        self.opened.append(name)
        for number in range(self.lengths[name]):
            self.read += 1
            yield f"{name}{number}"


def make_stream(shards: Shards, buffer: int = 4) -> Stream:
    return Stream(list(LENGTHS), shards, list(LENGTHS.values()), buffer=buffer)


def test_samples_are_numbered_through_the_shards() -> None:
    stream = make_stream(Shards())
    assert len(stream) == 30
    assert [stream[index] for index in (0, 9, 10, 12, 13, 29)] == ["a0", "a9", "b0", "b2", "c0", "c16"]
    assert stream.__getitems__([11, 3]) == ["b1", "a3"]
    for index in (-1, 30):
        with pytest.raises(IndexError, match="within 30 samples"):
            stream[index]


def test_an_epoch_opens_each_shard_once_and_reads_each_sample_once() -> None:
    shards = Shards()
    stream = make_stream(shards)
    order = StreamOrder(stream.lengths, stream.buffer, seed=3)
    for epoch in range(3):
        shards.opened.clear()
        shards.read = 0
        found = [
            sample
            for start in range(0, 30, 7)
            for sample in stream.__getitems__(order.samples(epoch, start, min(start + 7, 30)).tolist())
        ]
        assert sorted(found) == sorted(f"{name}{n}" for name, length in LENGTHS.items() for n in range(length))
        # What the epoch before read last may still be at hand.
        assert len(shards.opened) == len(set(shards.opened)) and shards.read <= 30
        assert epoch or (len(shards.opened), shards.read) == (3, 30)


def test_a_process_that_fills_one_slot_skips_forward() -> None:
    shards = Shards()
    stream = make_stream(shards)
    order = StreamOrder(stream.lengths, stream.buffer, seed=3)
    for start in range(0, 30, 6):
        stream.__getitems__(order.samples(0, start, start + 3).tolist())
    assert len(shards.opened) == len(set(shards.opened)) >= 2, "no shard is opened twice"


@pytest.mark.parametrize("buffer", [1, 4, 100])
@pytest.mark.parametrize(("found", "error"), [(8, "only 8"), (12, "11 or more")])
def test_a_shard_of_another_length_is_named_with_both_numbers(found: int, error: str, buffer: int) -> None:
    stream = make_stream(Shards({**LENGTHS, "a": found}), buffer)
    with pytest.raises(TaskError, match=f"shard 'a' was declared with 10 samples, but it yields {error}"):
        for index in range(10):
            stream[index]


def test_skipping_past_the_end_of_a_short_shard_is_noticed() -> None:
    with pytest.raises(TaskError, match="shard 'a' was declared with 10 samples, but it yields only 5"):
        make_stream(Shards({**LENGTHS, "a": 5}), 1)[8]


def test_lengths_that_cannot_be() -> None:
    with pytest.raises(SpecError, match="2 shards have 1 lengths"):
        Stream(["a", "b"], iter, [1])
    with pytest.raises(SpecError, match="length of shard 'b' must be a whole number of at least 1, found 0"):
        Stream(["a", "b"], iter, [1, 0])
    with pytest.raises(SpecError, match="buffer"):
        Stream(["a"], iter, [1], buffer=0)
