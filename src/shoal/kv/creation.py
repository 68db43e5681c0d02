"""`create`: a store in this process, on servers of its own, of the run, or of others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shoal.comm.security import RunKey
from shoal.errors import SpecError
from shoal.kv.desk import KvDesk
from shoal.kv.lines import HomeLine, ShardLine
from shoal.kv.requests import StoreConsistency
from shoal.kv.servers import SERVERS_VARIABLE, KvServers, ServersPlace
from shoal.kv.store import KVStore
from shoal.kv.vault import Vault, make_memory
from shoal.roles.process.joining import Fellows, orphan_watch
from shoal.spec import World

_TIMEOUT_S = 120.0


def create(
    kind: str = "local",
    *,
    servers: int | str | Sequence[str] | None = None,
    key: RunKey | str | Path | None = None,
    world: World | None = None,
) -> KVStore:
    """A store: `local`, in this process; or `dist_sync`, `dist_async` or `dist_ssp:3`, which all workers that
    `shoal run` or torchrun started have in common. All call this.

    Args:
        kind: Who waits for whom.
        servers: How many processes of this host hold it, which the first worker starts: 1 where nothing is said.
            With `shoal run --servers 2` those of the run. Or the addresses of servers that `shoal kv serve` has
            started, on any hosts, which keep what they hold when the workers leave.
        key: With addresses: the servers' key, or the file it is in.
        world: Where this process stands; default what `shoal run` or torchrun says.
    """
    if kind == "local":
        fd = make_memory()
        desk = KvDesk(Vault(fd))
        os.close(fd)
        return KVStore(kind, [HomeLine(desk)], World(), opens="dist_sync")
    StoreConsistency.parse(kind)
    world = World.from_environment() if world is None else world
    if isinstance(servers, str):
        servers = [one for one in servers.split(",") if one]
    if servers is not None and not isinstance(servers, int):
        if key is None:
            raise SpecError("kv: servers that are named by their addresses need their key; give key=FILE.")
        return _connected(kind, servers, key if isinstance(key, RunKey) else RunKey.load(key), world)
    if key is not None:
        raise SpecError("kv: key= is for servers that are named by their addresses; leave it out.")
    if (given := os.environ.get(SERVERS_VARIABLE)) is not None:
        place = ServersPlace.parse(given)
        if servers not in (None, len(place.addresses)):
            raise SpecError(
                f"kv: servers={servers}, but the run has --servers {len(place.addresses)}; leave it out."
            )
        return _connected(kind, place.addresses, RunKey.load(place.key_file), world, drops=True)
    return _with_own_servers(kind, 1 if servers is None else servers, world)


def _with_own_servers(kind: str, servers: int, world: World) -> KVStore:
    """The first worker starts them."""
    fellows = Fellows(world, orphan_watch())
    held = KvServers.of_this_host(servers) if world.global_rank == 0 else None
    try:
        place = ServersPlace.parse(fellows.hear_first("" if held is None else held.place.text))
        store = _connected(kind, place.addresses, RunKey.load(place.key_file), world)
    except BaseException:
        if held is not None:
            held.close()
        raise
    store.servers, store.fellows = held, fellows
    return store


def _connected(kind: str, addresses: Sequence[str], key: RunKey, world: World, *, drops: bool = False) -> KVStore:
    lines: list[ShardLine] = []
    try:
        for shard in range(len(addresses)):
            lines.append(ShardLine(shard, addresses, key, _TIMEOUT_S))
        return KVStore(kind, lines, world, drops=drops)
    except BaseException:
        for line in lines:
            line.close()
        raise
