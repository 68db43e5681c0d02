"""The parameter server: state machines without I/O for the `ps` strategy, and plain objects for everybody.

`Server` and `Client` need nothing else of Shoal: a server holds parameters and their optimizer, clients get,
update and store them. Both are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy import found_in

if TYPE_CHECKING:
    from shoal.ps.plain.client import Client
    from shoal.ps.plain.merging import Merging
    from shoal.ps.plain.server import Server

__all__ = ["Client", "Merging", "Server"]

_HOMES = {"Client": "plain.client", "Merging": "plain.merging", "Server": "plain.server"}

__getattr__ = found_in(__name__, _HOMES)
