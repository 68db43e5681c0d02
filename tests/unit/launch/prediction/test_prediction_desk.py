"""The desk gives rows on in order, whoever brings them when; what one attempt left undone, the next one does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shoal.comm.desk_words import ONLY
from shoal.comm.parcel_lines import MemoryLine
from shoal.errors import PeerLost
from shoal.launch.prediction.desk import PredictionDesk, RowOrder, Rows
from shoal.launch.prediction.inflow import Inflow, values_from
from shoal.roles.inference.desk_link import DeskLink

GUARD_S = 10.0


class Office:
    """A desk, the rows that it gave on, and links of workers to it."""

    def __init__(self, reached_at: str) -> None:
        self._reached_at = reached_at
        self.given: list[list[int]] = []
        self.errors = 0
        self._links: list[DeskLink] = []
        self._desk: PredictionDesk | None = None

    def open(
        self, deliver: Callable[[Rows], None] | None = None, *, most_ahead: int = 4, inflow: Inflow | None = None
    ) -> PredictionDesk:
        self._desk = PredictionDesk(
            deliver or self._take,
            self._note_error,
            most_ahead=most_ahead,
            inflow=inflow,
            reached_at=self._reached_at,
        )
        self._desk.begin_attempt()
        return self._desk

    def link(self) -> DeskLink:
        assert self._desk is not None
        self._links.append(DeskLink(self._desk.options))
        return self._links[-1]

    def close(self) -> None:
        for link in self._links:
            link.close()
        if self._desk is not None:
            self._desk.close()

    def _take(self, rows: Rows) -> None:
        self.given.append(rows[ONLY].tolist())

    def _note_error(self) -> None:
        self.errors += 1


@pytest.fixture(params=["", "tcp://127.0.0.1:*"], ids=["on this host", "over hosts"])
def office(request: pytest.FixtureRequest) -> Iterator[Office]:
    found = Office(request.param)
    yield found
    found.close()


def rows(*numbers: int) -> dict[str, np.ndarray]:
    return {ONLY: np.array(numbers)}


def aside(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_rows_wait_for_those_before_them() -> None:
    order, first, second = RowOrder(), rows(0), rows(1)
    assert order.put(1, second) == [] and order.next == 0
    assert order.put(1, rows(9)) == [], "what comes again is passed over"
    assert order.put(0, first) == [first, second] and order.next == 2
    assert order.put(0, rows(9)) == []
    assert order.put(2, None) == [] and order.next == 3, "a batch without rows counts"


def test_rows_are_given_on_in_order(office: Office) -> None:
    desk = office.open()
    for number in (2, 0, 1):
        office.link().bring(number, rows(number, number))
    assert office.given == [[0, 0], [1, 1], [2, 2]]
    assert desk.num_rows == 6


def test_several_outputs_of_any_type_arrive_as_they_are(office: Office) -> None:
    given: list[Rows] = []
    office.open(given.append)
    made = {"scores": np.arange(6, dtype=np.float16).reshape(3, 2), "flags": np.array([True, False, True])}
    office.link().bring(0, made)
    assert {name: (array.dtype, array.tolist()) for name, array in given[0].items()} == {
        name: (array.dtype, array.tolist()) for name, array in made.items()
    }


def test_who_is_far_ahead_waits_for_the_others(office: Office) -> None:
    office.open(most_ahead=2)
    ahead, behind = office.link(), office.link()
    thread = aside(lambda: ahead.bring(2, rows(2)))
    thread.join(0.2)
    assert thread.is_alive()
    behind.bring(0, rows(0))
    thread.join(GUARD_S)
    assert not thread.is_alive() and office.given == [[0]]


def test_another_attempt_begins_with_the_first_missing_rows(office: Office) -> None:
    desk = office.open()
    before = office.link()
    before.bring(0, rows(0))
    before.bring(2, rows(2))
    assert desk.begin_attempt() == 1
    before.bring(1, rows(9))
    assert office.given == [[0]], "it is of the attempt before"
    office.link().bring(1, rows(1))
    assert office.given == [[0], [1], [2]]


def test_what_cannot_be_given_on_ends_it(office: Office) -> None:
    def refuse(rows: Rows) -> None:
        raise OSError("no room")

    desk = office.open(refuse)
    with pytest.raises(PeerLost):
        office.link().bring(0, rows(0))
    assert isinstance(desk.error, OSError) and office.errors == 1


def test_workers_fetch_what_comes_in(office: Office) -> None:
    inflow = Inflow(values_from(iter(["a", "b", "c"])))
    inflow._thread.join(GUARD_S)  # all of it has come: batches are as full as they can be
    office.open(inflow=inflow)
    first, second = office.link(), office.link()
    found = first.fetch(0, 2, waits=True)
    assert found is not None and (found.about.count, found.about.start) == (2, 0)
    again = second.fetch(0, 2, waits=True)
    assert again is not None and [*map(bytes, again.buffers)] == [*map(bytes, found.buffers)]
    rest = second.fetch(1, 2, waits=True)
    assert rest is not None and (rest.about.count, rest.about.start) == (1, 2)
    assert first.fetch(2, 2, waits=True) is None


def test_an_empty_batch_holds_nobody_up(office: Office) -> None:
    more = threading.Event()

    def slowly() -> Iterator[int]:
        yield 1
        more.wait(GUARD_S)

    office.open(inflow=Inflow(values_from(slowly())))
    link = office.link()
    link.fetch(0, 2, waits=True)
    empty = link.fetch(1, 2, waits=False)
    assert empty is not None and empty.about.count == 0
    link.bring(2, rows(2))
    link.bring(0, rows(0))
    assert office.given == [[0], [2]]
    more.set()


def test_a_desk_can_be_closed_while_somebody_waits_for_input(office: Office) -> None:
    more = threading.Event()
    desk = office.open(inflow=Inflow(values_from(iter(lambda: more.wait(GUARD_S), True))))
    link, ends = office.link(), list[Any]()

    def fetch() -> None:
        try:
            link.fetch(0, 1, waits=True)
        except PeerLost as error:
            ends.append(error)

    thread = aside(fetch)
    thread.join(0.1)
    if isinstance(link._line, MemoryLine):  # the other kind is not waited for
        link._line._channel.finish()  # as if the worker had ended
    desk.close()
    office._desk = None
    thread.join(GUARD_S)
    assert not thread.is_alive()
    more.set()
