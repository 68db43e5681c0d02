"""What a worker does that misses another: only its supervisor knows how all go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.errors import PeerLost
from shoal.strategies.base import Company

_ORDERS_S = 30.0
"""How long whoever misses a peer waits to be told how all go on: a supervisor knows of a lost host by then."""
_IDLE_S = 0.05


@contextmanager
def awaiting_orders(company: Company) -> Iterator[None]:
    """Who finds a peer gone in this block waits to be told how all go on, and leaves it with that."""
    try:
        yield
    except PeerLost:
        until = time.monotonic() + _ORDERS_S
        while company.on_idle is not None and (time.monotonic() < until or company.is_held()):
            company.on_idle()  # leaves this with the supervisor's order
            time.sleep(_IDLE_S)
        raise
