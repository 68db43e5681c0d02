"""What a link is written as, and what follows from it."""

from __future__ import annotations

import math

import pytest

from shoal.errors import SpecError
from shoal.spec import Cluster
from shoal.spec.link import NetworkLink


def test_a_link_is_read() -> None:
    assert NetworkLink.parse("bandwidth=100mbit, latency=20ms,loss=0.1%") == NetworkLink(
        bandwidth=12.5e6, latency=0.02, loss=pytest.approx(0.001)
    )
    assert NetworkLink.parse("latency=500us") == NetworkLink(bandwidth=math.inf, latency=pytest.approx(5e-4))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("100mbit", "has '100mbit'; write for instance bandwidth=100mbit"),
        ("bandwidth=100", "has '100' where a bandwidth such as 100mbit belongs; units are bit, kbit, mbit, gbit"),
        ("bandwidth=0mbit", "lets nothing through"),
        ("latency=20", "where a time such as 20ms belongs"),
        ("loss=60%", "loses more than half"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Cluster(on="local:2", link=text)


def test_one_host_has_no_link() -> None:
    with pytest.raises(SpecError, match="link are about several hosts, but on=local"):
        Cluster(link="latency=20ms")
