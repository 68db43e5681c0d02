"""How long an answer is waited for."""

from __future__ import annotations

from shoal.ps.link import AnswerPatience

MB = 1_000_000


def waits(patience: AnswerPatience, nbytes: int, count: int) -> list[float]:
    """How long each of several questions is waited for that nobody answers."""
    now, found = 0.0, []
    for _ in range(count):
        due = patience.begin(now, nbytes)
        found.append(due - now)
        patience.note_vain()
        now = due
    return found


def test_what_is_small_is_said_again_and_again():
    assert waits(AnswerPatience(0.5), 0, 4) == [0.5] * 4


def test_what_is_large_is_waited_for_twice_as_long_each_time_up_to_a_limit():
    assert waits(AnswerPatience(0.5), 10 * MB, 6) == [1.5, 2.5, 4.5, 8.5, 8.5, 8.5]
    assert waits(AnswerPatience(0.5), 200 * MB, 2) == [20.5, 20.5]


def test_slow_answers_are_waited_for_longer_and_quick_ones_forget_them():
    patience = AnswerPatience(0.5)
    patience.begin(0.0, 0)
    assert patience.answer(20.0) == 60.0
    now = 100.0
    for _ in range(20):
        patience.begin(now, 0)
        due = patience.answer(now + 0.1)
    assert due == now + 0.1 + 0.5


def test_an_answer_to_what_was_said_twice_teaches_nothing_but_the_wait_stays_long():
    patience = AnswerPatience(0.5)
    waits(patience, 10 * MB, 3)
    assert patience.answer(50.0, is_last=False) == 58.5
    assert patience.begin(50.0, 10 * MB) == 58.5
    assert patience.answer(51.0) == 53.0  # it came at once: twice as long as that took


def test_another_one_who_answers_is_not_judged_by_the_wait_for_the_first():
    patience = AnswerPatience(0.5)
    waits(patience, 10 * MB, 3)
    patience.begin_anew()
    assert patience.begin(60.0, 10 * MB) == 61.5
