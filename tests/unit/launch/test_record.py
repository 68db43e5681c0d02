"""What the end of a run has to say follows from what happened in it."""

from __future__ import annotations

from shoal.launch.record import Record
from shoal.observe import Event
from shoal.observe.happenings import Audited, Done, Finished, Restarted, Resumed, StepsTaken, Stopped


def record_of(*events: Event) -> Record:
    record = Record()
    for event in events:
        record.handle(event)
    return record


AUDIT = Event(Audited(samples=80, clean=True))
BACK = Event(Restarted(reason="killed", step=0, samples=0, undone=3, seconds=1.0), 1)


def test_what_was_counted_before_the_first_step_of_a_resumed_run_is_kept() -> None:
    """Where all steps were taken before, the coordinator is done at once."""
    record = record_of(AUDIT, Event(Resumed(step=26)), Event(Done(results={"steps": 26}), 0))
    assert record.results == {"audit": {"samples": 80, "clean": True}, "steps": 26}


def test_what_the_attempt_before_came_to_does_not_count() -> None:
    record = record_of(AUDIT, Event(Done(results={"digest": "a"}), 0), BACK)
    assert record.results == {}
    record.handle(Event(Done(results={"digest": "b"}), 0))
    assert record.results == {"digest": "b", "restarts": 1}


def test_the_speed_is_that_from_the_first_word_about_steps_to_the_last() -> None:
    steps = [
        Event(StepsTaken(steps=[[at, 0.5]], samples=10 * at, total_steps=9), 0, 100.0 + at) for at in (1, 2, 5)
    ]
    record = record_of(*steps, Event(Done(results={"results": {"loss": 0.5}}), 0))
    ending = record.ending(None)
    assert isinstance(ending, Finished) and ending.samples_per_s == 10.0 and ending.results == {"loss": 0.5}
    assert record.total_steps == 9
    stopped = record_of(*steps[:1]).ending("interrupted")
    assert isinstance(stopped, Stopped) and (stopped.reason, stopped.samples_per_s) == ("interrupted", None)
