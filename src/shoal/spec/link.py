"""`NetworkLink`: the network between hosts as another would be, `bandwidth=100mbit,latency=20ms,loss=0.1%`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Self

from shoal.errors import SpecError

SEGMENT_BYTES = 1448
"""What tcp sends in one packet of an Ethernet."""
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_KEYS = ("bandwidth", "latency", "loss")


@dataclass(frozen=True, kw_only=True)
class NetworkLink:
    """What every host has to all others together, in one direction."""

    bandwidth: float = math.inf
    """Bytes that leave a host in a second."""
    latency: float = 0.0
    """Seconds that each byte is on its way."""
    loss: float = 0.0
    """The share of packets that do not arrive, and are sent again."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """From what the user wrote."""
        found: dict[str, float] = {}
        for word in text.split(","):
            key, equals, value = word.strip().partition("=")
            if key not in _KEYS or not equals:
                raise SpecError(
                    f"Cluster: link={text} has {word!r}; write for instance "
                    "bandwidth=100mbit,latency=20ms,loss=0.1%, or some of these."
                )
            found[key] = _READERS[key](text, value)
        return cls(**found)

    @property
    def round_trip_s(self) -> float:
        """There and back."""
        return 2 * self.latency


def _bandwidth(text: str, value: str) -> float:
    number, unit = _split(text, value, _BITS, "a bandwidth such as 100mbit")
    if not number:
        raise SpecError(f"Cluster: link={text} lets nothing through; give a bandwidth above 0.")
    return number * unit / 8


def _latency(text: str, value: str) -> float:
    number, unit = _split(text, value, _SECONDS, "a time such as 20ms")
    return number * unit


def _loss(text: str, value: str) -> float:
    number, unit = _split(text, value, {"%": 0.01}, "a share such as 0.1%")
    if number * unit > 0.5:
        raise SpecError(f"Cluster: link={text} loses more than half of all packets; give a loss of at most 50%.")
    return number * unit


_READERS = {"bandwidth": _bandwidth, "latency": _latency, "loss": _loss}


def _split(text: str, value: str, units: dict[str, float] | dict[str, int], wanted: str) -> tuple[float, float]:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z%]+)", value.strip().lower(), re.ASCII)
    if found is None or found[2] not in units:
        raise SpecError(
            f"Cluster: link={text} has {value!r} where {wanted} belongs; units are {', '.join(units)}."
        )
    return float(found[1]), units[found[2]]
