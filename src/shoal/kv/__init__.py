"""A key-value store on servers: `store = shoal.kv.create("dist_async")`.

requests    what a store asks of a server
rules       what a push does to rows; pure functions
vault       memory that outlives its writers, with a journal; all processes of a host may use it
desk        keys, who may go on, each change once; no sockets
holders     who holds a shard, and what a server wishes that to be; pure functions
shard_copy  one shard at one server, primary or backup; no sockets, no clocks
register    where servers agree on holders
messages    what servers say to each other
serve       one server's process, whose loop is the plain parameter server's
servers     all of them: started, watched, followed by others
pushes      which of several goes first
lines       from a store to a shard, through memory or the plain server's line
store       `KVStore`
creation    `create`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.lazy import found_in

if TYPE_CHECKING:
    from shoal.kv.creation import create
    from shoal.kv.servers import KvServers
    from shoal.kv.store import KVStore

__all__ = ["KVStore", "KvServers", "create"]

__getattr__ = found_in(__name__, {"KVStore": "store", "KvServers": "servers", "create": "creation"})
