"""Letters between two processes: crates are filled again, large ones are given back, and nobody waits to send."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from shoal.arena import Counters, Segment, counter_bytes
from shoal.comm.group.letters import LARGEST_KEPT_BYTES, Inbox, Outbox
from shoal.comm.group.regions import LETTER_NUMBERS, MOST_LETTERS
from shoal.errors import PeerLost, ProtocolError


class Stuck(Exception):
    """Somebody waited for what would never come."""


class Pair:
    """Both ends in one process."""

    def __init__(self) -> None:
        segment = Segment()
        segment.reserve("counters", counter_bytes(2))
        segment.reserve("letters", 8 * LETTER_NUMBERS * MOST_LETTERS)
        segment.map()
        self.counters: Counters = segment.counters("counters", self._give_up)
        letters = segment.tensor("letters", torch.int64).numpy()
        self.outbox = Outbox(self.counters, 0, 1, letters)
        self.inbox = Inbox(self.counters, 0, 1, letters, sender=5)
        segment.close()

    def _give_up(self) -> None:
        raise Stuck

    def take(self, numel: int, tag: int = 0, dtype: torch.dtype = torch.uint8) -> Tensor:
        room = torch.zeros(numel, dtype=dtype)
        self.inbox.receive(room, tag).wait()
        return room


def num_memory_files() -> int:
    """Descriptors of memory without a name that this process has."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:shoal-arena")
        except FileNotFoundError:
            continue  # the folder that was listed
    return found


def test_one_crate_serves_messages_that_are_taken_in_turn() -> None:
    pair = Pair()
    pair.outbox.send(torch.arange(1000, dtype=torch.int32), 0)
    assert pair.take(1000, dtype=torch.int32).tolist() == list(range(1000))
    before = num_memory_files()
    for number in range(3 * MOST_LETTERS):
        pair.outbox.send(torch.tensor([number], dtype=torch.int32), 0)
        assert int(pair.take(1, dtype=torch.int32)) == number
    assert num_memory_files() == before


def test_large_crates_are_given_back() -> None:
    pair = Pair()
    before = num_memory_files()
    sent = torch.arange(LARGEST_KEPT_BYTES + 1) % 251
    transfer = pair.outbox.send(sent.to(torch.uint8), 0)
    assert torch.equal(pair.take(len(sent)), sent.to(torch.uint8))
    transfer.wait()
    assert num_memory_files() == before


def test_a_small_message_finds_room_where_a_large_one_was() -> None:
    pair = Pair()
    for numel in (10, 100_000, 20, 200_000):
        pair.outbox.send(torch.full((numel,), numel % 100, dtype=torch.uint8), 0)
        assert pair.take(numel).tolist() == [numel % 100] * numel


def test_more_than_there_are_letters() -> None:
    """The rest follows as letters are taken: when more is sent, or when the sender looks up."""
    pair = Pair()
    count = 2 * MOST_LETTERS + 3
    last = [pair.outbox.send(torch.tensor([number]), 0) for number in range(count)][-1]
    found = [int(pair.take(1, dtype=torch.int64)) for _ in range(MOST_LETTERS)]
    with pytest.raises(Stuck):
        pair.take(1)
    with pytest.raises(Stuck):
        last.wait()  # which has posted what it could
    for _ in range(2):
        pair.outbox.push()
        found += [int(pair.take(1, dtype=torch.int64)) for _ in range(min(MOST_LETTERS, count - len(found)))]
    last.wait()
    assert found == list(range(count))


def test_what_comes_under_another_tag_is_kept() -> None:
    pair = Pair()
    for number, tag in enumerate((4, 4, 9, 4)):
        pair.outbox.send(torch.tensor([number]), tag)
    found = [int(pair.take(1, tag, torch.int64)) for tag in (9, 4, 4, 4)]
    assert found == [2, 0, 1, 3]


def test_content_of_a_sender_that_is_gone() -> None:
    pair = Pair()
    pair.outbox.send(torch.ones(3), 0)
    crate = pair.outbox._crates[0]
    assert crate is not None
    crate.segment.close()  # as the end of its process would
    with pytest.raises(PeerLost, match="Worker 5 is gone: what it sent cannot be read"):
        pair.take(12)


def test_another_size_than_awaited() -> None:
    pair = Pair()
    pair.outbox.send(torch.ones(3), 0)
    with pytest.raises(ProtocolError, match="Worker 5 sent 12 bytes where 8 were awaited"):
        pair.take(8)
