"""Events survive the trip through JSON; a failing sink harms nobody else."""

import pytest

from shoal.errors import LaunchError, SpecError
from shoal.observe import Bus, Event


class Recorder:
    """A sink that keeps what it gets, and fails when told to."""

    def __init__(self, fail_at: str = "", error: Exception | None = None) -> None:
        self.events: list[Event] = []
        self.closed = False
        self._fail_at = fail_at
        self._error = error

    def handle(self, event: Event) -> None:
        if self._error is not None and event.kind == self._fail_at:
            raise self._error
        self.events.append(event)

    def close(self) -> None:
        self.closed = True
        if self._error is not None and self._fail_at == "close":
            raise self._error

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


def test_event_survives_json():
    event = Event("steps", 3, {"steps": [[1, 0.5], [2, 0.25]], "samples": 128}, time=12.5)
    assert Event.from_json(event.to_json()) == event
    assert "\n" not in event.to_json()


@pytest.mark.parametrize("text", ["{", "[1]", '{"colour": "red"}', "3"])
def test_what_is_no_event_is_refused(text):
    with pytest.raises(SpecError, match="not an event"):
        Event.from_json(text)


def test_bus_hands_events_to_all_in_order():
    sinks = [Recorder(), Recorder()]
    bus = Bus(sinks)
    bus.emit(Event("world"))
    bus.emit(Event("beat"))
    bus.close()
    assert [sink.kinds for sink in sinks] == [["world", "beat"]] * 2
    assert all(sink.closed for sink in sinks)


def test_failing_sink_is_dropped_with_one_warning():
    good, bad, other = Recorder(), Recorder("beat", RuntimeError("broken pipe")), Recorder()
    bus = Bus([good, bad, other])
    bus.emit(Event("world"))
    bus.emit(Event("beat"))
    bus.emit(Event("beat"))
    assert bad.kinds == ["world"]
    for sink in (good, other):
        assert sorted(sink.kinds) == ["beat", "beat", "warning", "world"]
    warning = next(event for event in good.events if event.kind == "warning")
    assert "Recorder" in warning.values["text"]
    assert "broken pipe" in warning.values["text"]


def test_all_sinks_failing_leaves_training_alone():
    bus = Bus([Recorder("beat", RuntimeError("a")), Recorder("warning", RuntimeError("b"))])
    bus.emit(Event("beat"))
    bus.emit(Event("beat"))
    bus.close()


def test_shoal_errors_pass_through():
    bus = Bus([Recorder("steps", LaunchError("the disk is full"))])
    with pytest.raises(LaunchError, match="disk is full"):
        bus.emit(Event("steps"))


def test_close_reaches_every_sink_and_then_raises():
    first, last = Recorder(), Recorder("close", LaunchError("the disk is full"))
    with pytest.raises(LaunchError, match="disk is full"):
        Bus([first, last]).close()
    assert first.closed
