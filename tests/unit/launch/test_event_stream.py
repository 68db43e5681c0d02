"""Events that other threads read while they come."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.launch import live
from shoal.launch.live import EventStream
from shoal.observe import Event
from shoal.observe.happenings import Warned

GUARD_S = 30.0


def told(number: int) -> Event:
    return Event(Warned(text=str(number)))


def read(stream: EventStream) -> list[int]:
    return [int(event.values["text"]) for event in stream]


def test_every_reader_gets_all_of_them_whenever_it_begins() -> None:
    stream = EventStream()
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(read, stream)
        for number in range(1000):
            stream.handle(told(number))
        late = pool.submit(read, stream)
        stream.handle(told(1000))
        stream.close()
        assert early.result(GUARD_S) == late.result(GUARD_S) == list(range(1001))
    assert read(stream) == list(range(1001)), "also when it is over"


def test_a_reader_that_falls_behind_misses_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_KEPT_EVENTS", 10)
    stream = EventStream()
    for number in range(5):
        stream.handle(told(number))
    reader = iter(stream)
    assert [next(reader).values["text"] for _ in range(5)] == list("01234")
    for number in range(5, 25):
        stream.handle(told(number))
    stream.close()
    stream.close()
    assert [int(event.values["text"]) for event in reader] == list(range(15, 25))


def test_a_stream_without_events_ends() -> None:
    stream = EventStream()
    stream.close()
    assert read(stream) == []
