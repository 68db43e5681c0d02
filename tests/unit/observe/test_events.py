"""Every kind of event survives the trip through JSON, old ones are read; a failing sink harms nobody else."""

import json

import pytest

from shoal.errors import LaunchError, ProtocolError, SpecError
from shoal.observe import Bus, Event
from shoal.observe.happenings import KINDS, Decided, Done, Heartbeat, Lost, StateEntered, StepsTaken, WorldFormed
from shoal.spec.vocabulary import Role, State

WORLD = Event(WorldFormed(workers=2))
WHOLE = {
    "world": {
        "workers": 2,
        "spares": 0,
        "hosts": 1,
        "slots": 4,
        "strategy": "data",
        "threads": 1,
        "text": "2 workers",
        "places": 4,
        "servers": 1,
    },
    "state": {"state": "training", "step": 3},
    "beat": {"step": 3, "rss": 9, "phase": "waiting", "still": 0.5, "p99": 0.01, "gap": 0.0},
    "memory": {"peak_rss": [[0, 10], [1, 12]]},
    "steps": {
        "steps": [[1, 0.5], [2, None]],
        "samples": 16,
        "total_steps": 50,
        "lr": 0.1,
        "epoch": 1,
        "skipped": [2, 9.0],
    },
    "progress": {"step": 3, "total_steps": 9, "samples": 48},
    "evaluation": {"step": 3, "results": {"loss": 0.5, "accuracy": 1}},
    "scalars": {"scalars": [[3, "norm", 0.5]]},
    "text": {"name": "note", "text": "hello", "step": 3},
    "image": {"name": "digit", "path": "images/digit-3.png", "step": 3},
    "line": {"text": "hello", "level": "info"},
    "warning": {"text": "beware"},
    "fault": {
        "kind": "slow",
        "role": "worker",
        "rank": 1,
        "step": 5,
        "seconds": None,
        "factor": 4.0,
        "always": False,
    },
    "hung": {
        "role": "server",
        "rank": 1,
        "step": 7,
        "seconds": 1.5,
        "reason": "it is still",
        "where": "a.py:3",
        "stacks": "stacks-7.txt",
    },
    "lost": {"rank": 1, "reason": "killed", "places": [1], "role": "server", "node": 4},
    "host": {"name": "b", "reason": "gone", "processes": 3},
    "host_added": {"name": "c"},
    "replaced": {
        "rank": 1,
        "seconds": 0.5,
        "places": [1],
        "hosts": [[0], [1]],
        "spare": 0,
        "by": 2,
        "role": "worker",
        "node": 5,
    },
    "restarted": {"reason": "killed", "step": 20, "samples": 320, "undone": 4, "seconds": 1.0},
    "resumed": {"step": 20},
    "raised": {
        "step": 3,
        "slot": None,
        "sample": 17,
        "tried": 16,
        "raising": 1,
        "error": "ValueError: bad",
        "final": False,
    },
    "failed": {"message": "It failed.", "traceback": "…", "clear": True, "consequence": False, "misuse": True},
    "adopted": {"places": [1, 2], "generation": 3},
    "released": {"places": [1], "generation": 4},
    "scaled": {"workers": 2, "before": 1, "hosts": [[0], [1]], "reason": "asked for"},
    "decision": {"text": "4 workers", "what": "scale", "why": "asked for", "routine": False, "before": 2},
    "cuts": {"from_step": 5, "sizes": None},
    "audit": {
        "samples": 8,
        "clean": True,
        "once": 8,
        "more_than_once": 0,
        "never": 0,
        "cells": 4,
        "shards": [{"shard": 0, "never": 0}],
    },
    "checkpoint": {"step": 5, "path": "step-5", "digest": "x", "nbytes": 8, "seconds": 0.1, "stall": 0.01},
    "saved": {"path": "model.safetensors", "digest": "x"},
    "done": {"results": {"steps": 5}, "memory": {"host": 10}},
    "finished": {"results": {"loss": 0.5}, "seconds": 2.5, "samples_per_s": 6400.0},
    "stopped": {"reason": "interrupted", "results": {}, "seconds": 2.5, "samples_per_s": 6400.0},
}
"""Of every kind all that it can tell."""


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


def test_all_kinds_are_listed_here():
    assert WHOLE.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_survives_json_and_keeps_its_keys(kind):
    event = Event.of(kind, 3, WHOLE[kind], time=12.5)
    assert json.loads(event.to_json()) == {"kind": kind, "rank": 3, "values": WHOLE[kind], "time": 12.5}
    assert "\n" not in event.to_json()
    assert Event.from_json(event.to_json()) == event


def test_events_are_typed():
    event = Event.of("state", 1, {"state": "training", "step": 3}, 0.0)
    assert event == Event(StateEntered(state=State.TRAINING, step=3), 1, 0.0)
    assert isinstance(Event.of("lost", values=WHOLE["lost"]).what.role, Role)


def test_what_there_is_not_is_not_written():
    assert Event(Lost(rank=1, reason="killed")).values == {"rank": 1, "reason": "killed"}
    assert Event(Heartbeat(step=1, rss=2)).values == {"step": 1, "rss": 2, "still": 0.0}
    assert Event(Done(results={})).values == {"results": {}}
    assert Event(StepsTaken(steps=[])).values == {"steps": [], "samples": 0, "total_steps": 0}


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "world", "values": {"workers": 2, "spares": 0, "slots": 2, "strategy": "data", "threads": 1}},
        {"kind": "beat", "rank": 0, "values": {"step": 3, "rss": 17}},
        {"kind": "lost", "rank": 1, "values": {"rank": 1, "reason": "killed"}},
        {"kind": "replaced", "rank": 1, "values": {"rank": 1, "spare": 0, "seconds": 0.5}},
        {"kind": "done", "rank": 0, "values": {"results": {"loss": 0.5}}},
        {"kind": "stopped", "rank": None, "values": {"reason": "Ctrl-C"}},
        {"kind": "audit", "rank": None, "values": {"cells": 40, "samples": 80, "clean": True, "shards": []}},
    ],
)
def test_what_earlier_versions_wrote_is_read(line):
    event = Event.from_json(json.dumps({"rank": None, "time": 12.5, **line}))
    assert event.kind == line["kind"] and event.values.items() >= line["values"].items()


def test_keys_of_later_versions_are_passed_over_but_for_what_a_decision_was_made_by():
    assert Event.of("resumed", values={"step": 3, "mood": "good"}).values == {"step": 3}
    told = Event.of("decision", values=WHOLE["decision"]).what
    assert isinstance(told, Decided) and told.more == {"before": 2}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("rumour", {}),
        ("steps", {}),
        ("steps", {"steps": 3}),
        ("steps", {"steps": [3]}),
        ("state", {"state": "dancing"}),
        ("lost", {"rank": "1", "reason": "killed"}),
        ("lost", {"rank": True, "reason": "killed"}),
        ("lost", {"rank": 1, "reason": "killed", "role": "king"}),
        ("done", {"results": [], "memory": None}),
        ("done", {"results": {}, "memory": {"host": 0.5}}),
    ],
)
def test_what_says_nothing_is_refused(kind, values):
    with pytest.raises(ProtocolError):
        Event.of(kind, values=values)


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[1]", '{"colour": "red"}', "3", '{"kind": "rumour"}', '{"kind": ["world"]}'),
        '{"kind": "resumed", "values": {"step": 1}, "rank": "first"}',
        '{"kind": "resumed", "values": [1]}',
        '{"kind": "warning", "values": {"text": null}}',
    ],
)
def test_what_is_no_event_is_refused(text):
    with pytest.raises(SpecError, match="not an event"):
        Event.from_json(text)


def test_bus_hands_events_to_all_in_order():
    sinks = [Recorder(), Recorder()]
    bus = Bus(sinks)
    bus.emit(WORLD)
    bus.emit(Event.of("beat"))
    bus.close()
    assert [sink.kinds for sink in sinks] == [["world", "beat"]] * 2
    assert all(sink.closed for sink in sinks)


def test_failing_sink_is_dropped_with_one_warning():
    good, bad, other = Recorder(), Recorder("beat", RuntimeError("broken pipe")), Recorder()
    bus = Bus([good, bad, other])
    bus.emit(WORLD)
    bus.emit(Event.of("beat"))
    bus.emit(Event.of("beat"))
    assert bad.kinds == ["world"]
    for sink in (good, other):
        assert sorted(sink.kinds) == ["beat", "beat", "warning", "world"]
    warning = next(event for event in good.events if event.kind == "warning")
    assert "Recorder" in warning.values["text"]
    assert "broken pipe" in warning.values["text"]


def test_all_sinks_failing_leaves_training_alone():
    bus = Bus([Recorder("beat", RuntimeError("a")), Recorder("warning", RuntimeError("b"))])
    bus.emit(Event.of("beat"))
    bus.emit(Event.of("beat"))
    bus.close()


def test_shoal_errors_pass_through():
    bus = Bus([Recorder("steps", LaunchError("the disk is full"))])
    with pytest.raises(LaunchError, match="disk is full"):
        bus.emit(Event.of("steps", values={"steps": []}))


def test_close_reaches_every_sink_and_then_raises():
    first, last = Recorder(), Recorder("close", LaunchError("the disk is full"))
    with pytest.raises(LaunchError, match="disk is full"):
        Bus([first, last]).close()
    assert first.closed
