"""What callbacks were told outlives who told it, and is taken back where the user goes on from an earlier step."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import DiskRefused
from shoal.observe.told_marks import MOST_ASKED, Mark, ToldMarks, rewind_told


def test_another_process_finds_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    first, second = ToldMarks.open(path), ToldMarks.open(path)
    first[Mark.STEP] = 7
    assert second[Mark.STEP] == 7
    first.close()
    assert ToldMarks.open(path)[Mark.STEP] == 7, "who comes later makes no new one"
    second.raise_to(Mark.STEP, 5)
    assert second[Mark.STEP] == 7


def test_private_ones_are_of_one_process() -> None:
    marks = ToldMarks.private()
    marks[Mark.STEP] = 3
    assert ToldMarks.private()[Mark.STEP] == 0 and marks[Mark.STEP] == 3


def test_evaluations_are_asked_for_in_order_and_not_without_end() -> None:
    marks = ToldMarks.private()
    for step in (3, 3, 2, 8):
        assert marks.ask_evaluation(step)
    assert marks.asked == [3, 8], "each once; what lies before the last is past already"
    assert all(marks.ask_evaluation(10 + number) for number in range(MOST_ASKED - 2))
    assert not marks.ask_evaluation(1000) and len(marks.asked) == MOST_ASKED


def test_what_came_after_the_step_is_void_when_the_user_goes_on_there(tmp_path: Path) -> None:
    path, events = tmp_path / "marks", tmp_path / "events.jsonl"
    rewind_told(path, events, 5)
    assert not path.exists(), "a task without callbacks has none"
    marks = ToldMarks.open(path)
    void = (Mark.STARTED, Mark.ENDED, Mark.STOP, Mark.INSIDE, Mark.WANTED)
    for mark in void:
        marks[mark] = 1
    marks[Mark.STEP], marks[Mark.EVALUATION], marks[Mark.CHECKPOINT] = 9, 8, 4
    for step in (2, 7):
        marks.ask_evaluation(step)
    events.write_text("a line\n")
    rewind_told(path, events, 5)
    assert (marks[Mark.STEP], marks[Mark.EVALUATION], marks[Mark.CHECKPOINT]) == (5, 5, 4)
    assert not any(marks[mark] for mark in void)
    assert marks.asked == [2] and marks[Mark.FAULT] == len("a line\n")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiskRefused, match="it is not there"):
        ToldMarks.open(tmp_path / "gone" / "marks")
