"""Federated training with clients from outside: processes of others, on any host, with data that stays there.

A server holds the model, and merges what clients bring as it comes; nobody waits for anybody. `serve` is the
server, `take_part` a client. What a client needs is a ticket and a task of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy import found_in

if TYPE_CHECKING:
    from shoal.federated.client import take_part
    from shoal.federated.server import serve

__all__ = ["serve", "take_part"]

_HOMES = {"serve": "server", "take_part": "client"}

__getattr__ = found_in(__name__, _HOMES)
