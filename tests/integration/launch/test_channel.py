"""The channel between a supervisor and a process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from shoal.comm.channel import CUT_MARK, LIMIT_BYTES, MAX_FDS, MOST_BYTES, Channel
from shoal.errors import PeerLost, ProtocolError


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    pair = Channel.pair()
    yield pair
    for end in pair:
        end.close()


def test_messages_arrive_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    sent = [{"kind": "steps", "steps": [[step, 0.5]], "text": "é" * step} for step in range(50)]
    for message in sent:
        ours.send(message)
    assert [theirs.poll() for _ in sent] == sent
    assert theirs.poll() is None


def test_receive_waits_and_gives_up(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    assert theirs.receive(0.01) is None
    threading.Timer(0.05, ours.send, [{"kind": "beat"}]).start()
    assert theirs.receive(30) == {"kind": "beat"}


def test_a_closed_peer_is_lost_after_its_last_words(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    ours.send({"kind": "done"})
    ours.close()
    assert theirs.poll() == {"kind": "done"}
    with pytest.raises(PeerLost):
        theirs.poll()
    with pytest.raises(PeerLost):
        theirs.receive(1)
    with pytest.raises(PeerLost):
        theirs.send({"kind": "beat"})


def test_words_unread_by_a_closed_peer_do_not_hide_its_own(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    theirs.send({"kind": "stop"})
    ours.send({"kind": "failed"})
    ours.close()
    assert theirs.receive(1) == {"kind": "failed"}
    with pytest.raises(PeerLost):
        theirs.receive(1)


def test_a_long_traceback_is_cut_at_its_start_and_says_so(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    ours.send({"kind": "failed", "message": "m", "traceback": "é" * LIMIT_BYTES + "the end"})
    received = theirs.poll()
    assert received is not None
    assert received["message"] == "m"
    assert received["traceback"].startswith(CUT_MARK)
    assert received["traceback"].endswith("the end")


def test_two_long_texts_fit_one_message(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    ours.send({"text": "a" * LIMIT_BYTES, "traceback": "b" * LIMIT_BYTES})
    received = theirs.poll()
    assert received is not None
    assert received["text"].count("a") > 60_000 and received["traceback"].count("b") > 60_000


def test_a_message_of_any_sensible_size_arrives_with_its_descriptors(ends: tuple[Channel, Channel]) -> None:
    """As the audit of a thousand shards is: nothing of it can be cut."""
    ours, theirs = ends
    message = {"kind": "done", "results": {"shards": [{"shard": n, "never": 0} for n in range(100_000)]}}
    reader, writer = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    ours.send(message, [writer] * MAX_FDS)
    ours.send({"kind": "after"})
    received = theirs.poll_with_fds()
    assert received is not None and received[0] == message and len(received[1]) == MAX_FDS
    assert theirs.poll() == {"kind": "after"}
    for fd in received[1]:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before, "the memory file is closed at both ends"
    with pytest.raises(ProtocolError, match="at most 8 file descriptors, found 9"):
        ours.send({"kind": "spawn"}, [writer] * (MAX_FDS + 1))
    for fd in (reader, writer):
        os.close(fd)


@pytest.mark.parametrize("size", [0, -1, True, MOST_BYTES + 1, 5, "4"])
def test_a_file_that_does_not_hold_the_message_is_refused(ends: tuple[Channel, Channel], size: object) -> None:
    ours, theirs = ends
    ours.send({"": size})
    with pytest.raises(ProtocolError, match="no such file came"):
        theirs.poll()
    with open(__file__, "rb") as short:
        ours.send({"": size}, [short.fileno()])
        with pytest.raises(ProtocolError, match="refused"):
            theirs.poll()


@pytest.mark.parametrize("message", [{"results": "x" * MOST_BYTES}, {"kind": "done", "results": object()}])
def test_what_cannot_be_sent_is_refused(ends: tuple[Channel, Channel], message: dict) -> None:
    with pytest.raises(ProtocolError):
        ends[0].send(message)
    assert ends[1].poll() is None


def test_what_is_not_a_dict_is_refused(ends: tuple[Channel, Channel]) -> None:
    os.write(ends[0].fileno(), b"\x01")
    with pytest.raises(ProtocolError, match="must be a dict"):
        ends[1].poll()
    os.write(ends[0].fileno(), b"\xc1")
    with pytest.raises(ProtocolError, match="cannot be read"):
        ends[1].poll()


def test_file_descriptors_travel(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    reader, writer = os.pipe()
    ours.send({"kind": "spawn"}, [writer])
    os.close(writer)
    received = theirs.poll_with_fds()
    assert received is not None
    message, (copy,) = received
    assert message == {"kind": "spawn"} and not os.get_inheritable(copy)
    os.write(copy, b"through")
    os.close(copy)
    assert os.read(reader, 100) == b"through"
    assert os.read(reader, 100) == b"", "a copy of the descriptor is still open somewhere"
    os.close(reader)


def test_unwanted_file_descriptors_are_closed(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    reader, writer = os.pipe()
    ours.send({"kind": "beat"}, [writer])
    os.close(writer)
    assert theirs.poll() == {"kind": "beat"}
    assert os.read(reader, 100) == b""
    os.close(reader)


def test_a_full_buffer_makes_the_sender_wait_and_loses_nothing(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    count = 50
    sender = threading.Thread(
        target=lambda: [ours.send({"number": n, "text": "x" * 50_000}) for n in range(count)]
    )
    sender.start()
    numbers = [message["number"] for _ in range(count) if (message := theirs.receive(30))]
    sender.join(30)
    assert numbers == list(range(count))
