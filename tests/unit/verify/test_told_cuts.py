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
