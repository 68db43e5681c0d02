"""A key-value store on servers: `store = shoal.kv.create("dist_async")`.

rules       what a push does to rows; pure functions
vault       memory that outlives a server, with an undo journal
desk        keys, who may go on, each change once; no sockets
messages    requests and answers on the wire
serve       one server's process
servers     all of them: started, watched, followed by others
lines       from a store to a server
store       `create` and `KVStore`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy import found_in

if TYPE_CHECKING:
    from shoal.kv.servers import KvServers
    from shoal.kv.store import KVStore, create

__all__ = ["KVStore", "KvServers", "create"]

__getattr__ = found_in(__name__, {"KVStore": "store", "KvServers": "servers", "create": "store"})
