"""Numbers read well at every size."""

import pytest

from shoal.observe import Event, wording


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
    assert wording.line(Event(kind, values=values)) == text
