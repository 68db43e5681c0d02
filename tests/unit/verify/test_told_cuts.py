"""How a run cut its batches, as its events tell."""

from __future__ import annotations

from shoal.observe import Event
from shoal.verification.trials import told_cuts


def cuts(from_step: int, sizes: list[int] | None) -> Event:
    return Event.of("cuts", 0, {"from_step": from_step, "sizes": sizes})


def test_what_was_undone_is_forgotten() -> None:
    back = Event.of("restarted", None, {"step": 12, "samples": 1, "undone": 9, "seconds": 0.1, "reason": "died"})
    log = told_cuts([cuts(10, [3, 1]), cuts(20, [2, 2]), back, cuts(30, None)])
    assert [log.at(step) for step in (9, 10, 20, 29, 30)] == [None, (3, 1), (3, 1), (3, 1), None]
    start = Event.of("restarted", None, {**back.values, "step": 0})
    assert told_cuts([cuts(10, [3, 1]), start]).at(10) is None


def test_what_an_attempt_told_before_it_was_said_to_go_on_counts() -> None:
    steps = Event.of("steps", 0, {"steps": [[30, 1.0]]})
    back = Event.of("resumed", None, {"step": 25})
    before, again = [cuts(10, [3, 1]), cuts(28, [1, 3]), steps], [cuts(26, [3, 1]), cuts(27, [2, 2])]
    for late in ([*again, back], [again[0], back, again[1]], [back, *again]):
        log = told_cuts([*before, *late, steps])
        assert [log.at(step) for step in (10, 26, 27, 28)] == [(3, 1), (3, 1), (2, 2), (2, 2)]
