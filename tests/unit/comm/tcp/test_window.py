"""What losses do to a connection."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shoal.comm.tcp.window import Window
from shoal.spec.link import SEGMENT_BYTES, NetworkLink


def window_of(text: str) -> tuple[Window, NetworkLink]:
    link = NetworkLink.parse(text)
    return Window(link, np.random.default_rng(0)), link


def test_what_is_lost_arrives_a_round_trip_later_and_the_last_after_a_timer() -> None:
    window, _ = window_of("latency=10ms,loss=1%")
    followed = [window.let_out(1, 0.0, is_last=False) for _ in range(20_000)]
    last = [window.let_out(1, 0.0, is_last=True) for _ in range(20_000)]
    assert np.mean([late > 0 for late in followed]) == pytest.approx(0.01, rel=0.35)
    assert followed == pytest.approx([round(late / 0.02) * 0.02 for late in followed])
    assert np.mean([late > 0 for late in last]) == pytest.approx(0.02, rel=0.35)
    assert {late for late in last if late >= 0.2} and max(followed) < 0.2


def test_a_long_stream_is_as_fast_as_is_known_of_tcp() -> None:
    """At a share p of losses about sqrt(1.5 / p) packets are on their way (Mathis and others, 1997)."""
    window, link = window_of("latency=20ms,loss=0.1%")
    now, packets = 0.0, 200_000
    for _ in range(packets // 4):
        now = window.opens_at(4, now)
        window.let_out(4, now + link.latency, is_last=False)
    expected = SEGMENT_BYTES * math.sqrt(1500) / link.round_trip_s
    assert packets * SEGMENT_BYTES / now == pytest.approx(expected, rel=0.25)
