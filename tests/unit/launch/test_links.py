"""Channels to processes that do not read, and the line to a zygote that does not answer."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import msgpack
import pytest

from shoal.comm.channel import Channel
from shoal.comm.words import Garbled, Stop
from shoal.errors import LaunchError, PeerLost
from shoal.launch import zygote_line
from shoal.launch.links import MOST_UNSENT, Links
from shoal.launch.messages import Deaf, Said
from shoal.launch.zygote_line import PULSE_S, SILENT_S, ZygoteLine
from shoal.observe.happenings import CheckpointWritten, StateEntered
from shoal.spec.vocabulary import State

GUARD_S = 30.0
BULK = "x" * 10_000
"""Some of these fill a channel."""
HERE = StateEntered(state=State.READY)


def news(number: int) -> CheckpointWritten:
    """A long word."""
    return CheckpointWritten(step=number, path=BULK, digest="", nbytes=0, seconds=0.0, stall=0.0)


@pytest.fixture
def links() -> Iterator[Links]:
    made = Links()
    yield made
    made.close()


def receive_all(links: Links, end: Channel) -> list[int]:
    """What arrives, while the links send what they could not send before."""
    numbers = []
    while (message := end.receive(0.05)) is not None:
        numbers.append(message["step"])
        assert not list(links.collect())
    return numbers


def test_who_does_not_read_keeps_nobody_waiting_and_misses_nothing(links: Links) -> None:
    theirs = links.open(0)
    for number in range(MOST_UNSENT):
        links.say(0, news(number))
    assert receive_all(links, theirs) == list(range(MOST_UNSENT))
    theirs.close()


def test_who_reads_nothing_at_all_is_deaf(links: Links) -> None:
    theirs, others = links.open(3), links.open(4)
    for number in range(2 * MOST_UNSENT):
        links.say(3, news(number))
    links.say(4, Stop())
    others.send(HERE.as_message())
    told = list(links.collect())
    assert Deaf(3) in told and Said(4, HERE) in told and Deaf(4) not in told
    assert others.receive(GUARD_S) == {"kind": "stop"}
    theirs.close()
    others.close()


def test_what_waits_for_one_that_ends_is_forgotten(links: Links) -> None:
    theirs = links.open(0)
    for number in range(100):
        links.say(0, news(number))
    theirs.close()
    links.say(0, Stop())
    assert not list(links.collect())


def test_what_cannot_be_understood_is_told_as_such_and_the_rest_is_heard(links: Links) -> None:
    theirs = links.open(0)
    with socket.socket(fileno=os.dup(theirs.fileno())) as raw:
        raw.send(b"\xc1 not msgpack")
        raw.send(msgpack.packb([1, 2]))
    for message in ({"kind": "rumour"}, {}, {"kind": "steps", "steps": "many"}, {"kind": ["state"]}):
        theirs.send(message)
    theirs.send(HERE.as_message())
    *garbled, last = (one.word for one in links.collect() if isinstance(one, Said))
    assert len(garbled) == 6 and all(isinstance(word, Garbled) and word.text for word in garbled)
    assert last == HERE
    theirs.close()


class Zygote:
    """The other end of a line, and a clock."""

    def __init__(self) -> None:
        self.now = 0.0
        ours, self.end = Channel.pair()
        self.line = ZygoteLine(ours, clock=lambda: self.now)

    def look_for(self, seconds: float, every: float = 0.25) -> None:
        """Let time pass in which the host looks."""
        until = self.now + seconds
        while self.now < until:
            self.now += every
            list(self.line.collect())


@pytest.fixture
def zygote_end() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.line.close()
    made.end.close()


def test_a_silent_zygote_is_asked_and_given_up(zygote_end: Zygote) -> None:
    zygote_end.look_for(PULSE_S - 0.25)
    assert zygote_end.end.poll() is None
    zygote_end.look_for(0.5)
    assert zygote_end.end.poll() == {"kind": "ping"}
    with pytest.raises(LaunchError, match="has not answered for 60 s: it is stopped or hangs"):
        zygote_end.look_for(SILENT_S)
    assert zygote_end.end.poll() is None, "it was asked once"


def test_a_zygote_that_answers_is_asked_for_ever(zygote_end: Zygote) -> None:
    for _ in range(20):
        zygote_end.look_for(PULSE_S + 0.25)
        assert zygote_end.end.poll() == {"kind": "ping"}
        zygote_end.end.send({"kind": "pong"})


def test_time_in_which_the_host_did_not_look_is_not_the_zygotes_silence(zygote_end: Zygote) -> None:
    zygote_end.look_for(4 * SILENT_S, every=4 * SILENT_S)
    zygote_end.look_for(PULSE_S / 2)


def test_requests_to_a_zygote_that_does_not_read_wait_and_go_in_order(zygote_end: Zygote) -> None:
    gone: list[int] = []
    for number in range(100):
        zygote_end.line.send({"number": number, "text": BULK}, then=lambda number=number: gone.append(number))
    assert 0 < len(gone) < 100
    for number in range(100):
        assert zygote_end.end.receive(GUARD_S) == {"number": number, "text": BULK}
        list(zygote_end.line.collect())
    assert gone == list(range(100))


def test_a_zygote_that_hangs_up_is_lost(zygote_end: Zygote) -> None:
    zygote_end.end.close()
    with pytest.raises(PeerLost):
        list(zygote_end.line.collect())
    assert list(zygote_end.line.hang_up(zygote_line.SILENT_S)) == []
