"""The book finds what was used twice, never, or in the wrong number, however it was cut."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from shoal.errors import ProtocolError
from shoal.ledger import Order, Schedule
from shoal.ledger.book import Book, BookRow, CutLog, audit

SCHEDULE = Schedule(length=26, batch_size=8, slots=3, epochs=3, max_steps=None, order=Order(26, 0))
LAST = SCHEDULE.total_steps
CUT = (1, 5, 2)


def make_book(*, but: dict[int, tuple[int, ...]] | None = None, left_out: int = 0, since: int = 0) -> Book:
    """A book of all steps, cut another way from step 5 on, but for what is said."""
    book = Book(since)
    for step in range(since + 1, LAST + 1):
        sizes = CUT if step >= 5 else None
        if step != left_out:
            book.commit(step, (but or {}).get(step, SCHEDULE.sizes(step, sizes)), sizes)
    return book


def found(book: Book, last_step: int = LAST) -> tuple[int, int, int, int, bool]:
    result = audit(book, SCHEDULE, last_step)
    return tuple(result[name] for name in ("samples", "once", "more_than_once", "never", "clean"))  # type: ignore


def test_all_steps_once_are_clean() -> None:
    assert found(make_book()) == (78, 78, 0, 0, True)


def test_steps_that_are_known_to_be_whole_need_not_be_told_one_by_one() -> None:
    book = make_book(since=2)
    book.rows, book.cuts = book.rows[:2], CutLog()
    for last in (5, 5, LAST):
        book.commit_whole(SCHEDULE, last)
    assert found(book) == (62, 62, 0, 0, True)
    book = Book()
    book.commit(1, SCHEDULE.sizes(1, CUT), CUT)
    book.commit_whole(SCHEDULE, 11)
    assert found(book, 11) == (76, 76, 0, 0, True)
    assert found(book)[3] == 2, "the last step is not"


def test_a_missing_step_is_found() -> None:
    assert found(make_book(left_out=4)) == (78, 76, 0, 2, False)
    assert found(make_book(left_out=LAST)) == (78, 76, 0, 2, False)


def test_a_step_that_was_committed_twice_is_found() -> None:
    book = make_book()
    book.commit(6, SCHEDULE.sizes(6, CUT), CUT)
    assert found(book) == (78, 70, 8, 0, False)


def test_one_slot_too_few_and_another_too_many_do_not_make_up_for_each_other() -> None:
    few = replace_count(SCHEDULE.sizes(6, CUT), slot=1, by=-2)
    assert found(make_book(but={6: few})) == (78, 76, 0, 2, False)
    many = replace_count(SCHEDULE.sizes(2), slot=0, by=1)
    assert found(make_book(but={2: many})) == (78, 77, 1, 0, False)
    both = replace_count(replace_count(SCHEDULE.sizes(2), slot=0, by=1), slot=1, by=-1)
    assert sum(both) == 8 and found(make_book(but={2: both})) == (78, 76, 1, 1, False)


def test_what_was_used_beyond_the_last_step_is_no_good_either() -> None:
    assert found(make_book(), last_step=LAST - 1) == (76, 76, 2, 0, False)
    beyond = replace_count(SCHEDULE.sizes(LAST, CUT), slot=2, by=3)
    assert found(make_book(but={LAST: beyond})) == (78, 78, 3, 0, False)


def test_a_book_that_began_later_answers_for_what_came_since() -> None:
    assert found(make_book(since=4)) == (52, 52, 0, 0, True)


def test_steps_of_an_earlier_run_may_have_had_other_slots() -> None:
    book, before = Book(), replace(SCHEDULE, slots=2)
    for step in range(1, 4):
        book.commit(step, before.sizes(step))
    for step in range(4, LAST + 1):
        book.commit(step, SCHEDULE.sizes(step))
    assert found(book) == (78, 78, 0, 0, True)


def test_equal_steps_take_one_row() -> None:
    book, long = Book(), replace(SCHEDULE, length=8 * 100_000)
    for step in range(1, 100_001):
        book.commit(step, (2, 3, 3))
    assert len(book.rows) == 1 and audit(book, long, 100_000)["clean"]


def test_the_past_is_read_as_it_was_committed() -> None:
    told = make_book()
    counts = np.array([SCHEDULE.sizes(step, CUT if step >= 5 else None) for step in range(1, LAST + 1)])
    sizes = np.array([CUT if step >= 5 else (0, 0, 0) for step in range(1, LAST + 1)])
    book = Book()
    book.commit_past(1, counts, sizes)
    assert book.plain() == told.plain()


def test_a_book_comes_back_from_json() -> None:
    book = make_book(left_out=3)
    again = Book.from_plain(json.loads(json.dumps(book.plain())))
    assert again.plain() == book.plain() and again.cuts.at(5) == CUT


@pytest.mark.parametrize(
    "plain",
    [None, {}, {"since": 0, "rows": [[1, 2]], "cuts": []}, {"since": 0, "rows": [[1, 2, ["x"]]], "cuts": []},
     {"since": 0, "rows": [], "cuts": [[1, [2.5]]]}, {"since": 0, "rows": [], "cuts": 3}],
)  # fmt: skip
def test_what_is_no_book_is_refused(plain: object) -> None:
    with pytest.raises(ProtocolError, match="should be a"):
        Book.from_plain(plain)


def test_a_cut_that_is_told_again_makes_later_ones_void() -> None:
    log = CutLog()
    for step, sizes in ((2, (4, 4)), (5, (3, 5)), (9, (2, 6)), (6, (3, 5)), (8, None)):
        log.note(step, sizes)
    assert [log.at(step) for step in (1, 2, 5, 7, 8, 20)] == [None, (4, 4), (3, 5), (3, 5), None, None]
    assert len(log) == 3 and CutLog.from_plain(log.plain()).plain() == log.plain()


def replace_count(counts: tuple[int, ...], *, slot: int, by: int) -> tuple[int, ...]:
    return tuple(count + by * (number == slot) for number, count in enumerate(counts))


@pytest.mark.parametrize("batch_size", [8, 13])
def test_a_million_steps_are_audited_without_a_look_at_each(
    batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all batches are equal, and where the last one of each epoch is smaller."""
    schedule = replace(SCHEDULE, batch_size=batch_size, length=26 if batch_size == 13 else 8_002, epochs=1_000_000)
    last, looks = 1_000_000, 0
    book = Book()
    book.rows = _rows(schedule, last)
    count = Schedule.samples_after

    def counted(self: Schedule, step: int) -> int:
        nonlocal looks
        looks += 1
        return count(self, step)

    monkeypatch.setattr(Schedule, "samples_after", counted)
    samples = count(schedule, last)
    assert audit(book, schedule, last) == {
        "samples": samples,
        "once": samples,
        "more_than_once": 0,
        "never": 0,
        "clean": True,
    }
    assert looks <= 2 * len(book.rows) + 2 and len(book.rows) <= 2_001


def _rows(schedule: Schedule, last: int) -> list[BookRow]:
    """What a book has after so many steps, each of which used its batch."""
    if schedule.length % schedule.batch_size == 0:
        return [BookRow(1, last, schedule.sizes(1))]
    rows, per_epoch = [], schedule.steps_per_epoch
    for end in range(per_epoch, last + 1, per_epoch):
        rows += [BookRow(end - per_epoch + 1, end - 1, schedule.sizes(1)), BookRow(end, end, schedule.sizes(end))]
    if last % per_epoch:
        rows.append(BookRow(last // per_epoch * per_epoch + 1, last, schedule.sizes(1)))
    return rows
