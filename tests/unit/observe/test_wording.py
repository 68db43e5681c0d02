"""Numbers read well at every size."""

from dataclasses import asdict

import pytest

from shoal.observe import Event, wording
from shoal.observe.happenings import Audited
from shoal.observe.summary import RunSummary
from shoal.spec.chaos import Fault


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.97123, "0.9712"),
        (0, "0.0000"),
        (12.34567, "12.345"),
        (123456, "1.23e+05"),
        (1.5e-5, "1.5e-05"),
        (float("nan"), "nan"),
        (-0.25, "-0.25"),
        (None, "–"),
    ],
)
def test_number(value, text):
    assert wording.number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61, "1:01"), (3723, "1:02:03"), (None, "–:––")])
def test_duration(seconds, text):
    assert wording.duration(seconds) == text


@pytest.mark.parametrize(("num_bytes", "text"), [(312_400_000, "312 MB"), (2_540_000_000, "2.5 GB")])
def test_memory(num_bytes, text):
    assert wording.memory(num_bytes) == text


@pytest.mark.parametrize(("per_second", "text"), [(12345.6, "12,346"), (0.5, "0.50"), (None, "–")])
def test_rate(per_second, text):
    assert wording.rate(per_second) == text


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        ("replaced", {"rank": 1, "seconds": 0.5}, "worker 1 was replaced in 0.50 s"),
        (
            "replaced",
            {"rank": 1, "seconds": 0.5, "by": 0, "hosts": [[0, 1]]},
            "worker 0 took over the work of worker 1 in 0.50 s",
        ),
        (
            "scaled",
            {"workers": 1, "before": 4, "hosts": [[0, 1, 2, 3]], "reason": "asked for"},
            "1 worker in place of 4: asked for",
        ),
    ],
)
def test_who_came_and_went(kind, values, text):
    assert wording.line(Event.of(kind, values=values)) == text


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        ("lost", {"role": "server", "rank": 1, "node": 2, "reason": "killed"}, "server 1 was lost: killed"),
        (
            "lost",
            {"role": "coordinator", "rank": 0, "node": 0, "reason": "gone"},
            "the coordinator was lost: gone",
        ),
        ("replaced", {"role": "server", "rank": 1, "node": 5, "seconds": 0.5}, "server 1 was replaced in 0.50 s"),
        ("decision", {"text": "worker 1 gets less data"}, "coordinator: worker 1 gets less data"),
    ],
)
def test_what_happens_among_servers(kind, values, text):
    assert wording.line(Event.of(kind, values=values)) == text


@pytest.mark.parametrize(
    ("where", "stacks", "text"),
    [
        ("", "", ""),
        (
            "tasks.py:30 in read",
            "runs/a/stacks-7.txt",
            ", in tasks.py:30 in read; all stacks are in runs/a/stacks-7.txt",
        ),
    ],
)
def test_who_hangs_and_where(where, stacks, text):
    values = {"role": "worker", "rank": 1, "step": 7, "seconds": 1.2, "where": where, "stacks": stacks}
    line = wording.line(Event.of("hung", 1, {**values, "reason": "it gave no sign of life for 1.2 s"}))
    assert line == f"worker 1 hangs at step 7: it gave no sign of life for 1.2 s{text}"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault(kind="kill", rank=1, step=50), "fault: killed worker 1 at step 50"),
        (Fault(kind="hang", step=1080, seconds=3.0), "fault: stopped worker 0 at step 1,080 for 3 s"),
        (Fault(kind="slow", step=2, factor=4.0), "fault: slowed down worker 0 at step 2 by a factor of 4"),
        (Fault(kind="raise", step=3), "fault: raised an error in worker 0 at step 3"),
        (Fault(kind="kill", role="coordinator", step=6), "fault: killed the coordinator at step 6"),
    ],
)
def test_faults_that_were_asked_for(fault, text):
    assert wording.line(Event.of("fault", values=asdict(fault))) == text


SHARD = {"once": 40, "more_than_once": 0, "never": 0}
SAMPLES = {"samples": 4000, "once": 4000, "more_than_once": 0, "never": 0, "clean": True}
LATE = {"delay_mean": 0.75, "delay_max": 3}
CELLS = {"samples": 4000, "cells": 40, "clean": True, "shards": [SHARD, SHARD]}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (SAMPLES, "4,000 samples expected: 4,000 committed once, 0 more than once, 0 never"),
        (
            SAMPLES | {"once": 3990, "more_than_once": 4, "never": 6, "clean": False},
            "4,000 samples expected: 3,990 committed once, 4 more than once, 6 never",
        ),
        (CELLS, "4,000 samples expected, in 40 cells: all committed once, on each of 2 shards"),
        (
            CELLS | {"shards": [SHARD | {"never": 3}]},
            "4,000 samples expected, in 40 cells: 3 left out by the quorum, the others committed once",
        ),
        (
            CELLS | {"shards": [SHARD, SHARD | {"never": 3, "more_than_once": 1}], "clean": False},
            "4,000 samples expected, in 40 cells: 1 committed more than once, 3 never",
        ),
    ],
)
def test_what_became_of_the_data(values, text):
    assert wording.audit(Audited.from_plain(values)) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (SAMPLES, ""),
        (CELLS, ""),
        (CELLS | {"shards": [SHARD | dict.fromkeys(LATE, 0)]}, ""),
        (
            CELLS | {"shards": [SHARD | LATE, SHARD | LATE | {"delay_mean": 0.25, "delay_max": 7}]},
            "gradients arrived 0.50 updates late on average, 7 at most",
        ),
    ],
)
def test_how_late_gradients_were(values, text):
    told = Audited.from_plain(values)
    summary = RunSummary()
    summary.add(Event(told))
    assert wording.staleness(told) == text
    assert (("staleness", text) in wording.final_rows(summary)) == bool(text)
