"""`shoal kv`: servers of a key-value store that are nobody's run."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from shoal.errors import SpecError

kv = typer.Typer(
    no_args_is_help=True,
    help="""Serve a key-value store, for scripts that call shoal.kv.create.

    [dim]shoal kv serve --at tcp://127.0.0.1:7000 --key kv.key[/dim]""",
)


@kv.callback()
def root() -> None:
    """With a callback, one command is still named."""


@kv.command()
def serve(
    at: Annotated[
        str, typer.Option(help="The addresses of all servers, with commas.", metavar="tcp://HOST:PORT,…")
    ] = "tcp://127.0.0.1:7000",
    number: Annotated[int, typer.Option(help="Which of them is started here, from 0 on.", min=0)] = 0,
    key: Annotated[
        Path,
        typer.Option(
            help="The file with the key of servers and workers; a new one is written where there is none."
        ),
    ] = Path("kv.key"),
    store: Annotated[
        str,
        typer.Option(
            help="With several servers: have a copy of each shard on another one. Where they agree on who holds "
            "what: etcd://HOST:2379/PREFIX, or a file that all of them see.",
            metavar="etcd://…|FILE",
        ),
    ] = "",
    dead_after: Annotated[
        float, typer.Option(help="With --store: seconds without a sign until a backup takes over.", min=0.1)
    ] = 2.0,
) -> None:
    """Serve a store, or one part of several, until this is ended.

    Workers use it by kv.create("dist_async", servers="tcp://…,tcp://…", key="kv.key"), on any host; the file
    with the key has to be copied to all. What the servers hold stays when workers leave.

    [dim]shoal kv serve --at tcp://10.0.0.1:7000,tcp://10.0.0.2:7000 --number 0 --store etcd://10.0.0.3:2379/kv[/dim]
    """
    from shoal.comm.security import RunKey
    from shoal.kv.servers import KvServers

    addresses = [one for one in at.split(",") if one]
    if not addresses:
        raise SpecError("--at names no server; give the addresses of all, with commas.")
    if number >= len(addresses):
        raise SpecError(f"--number {number} is none of the {len(addresses)} servers of --at; count from 0.")
    if store and len(addresses) == 1:
        raise SpecError(
            "--store is for copies on other servers, and --at names one; name several, or leave it out."
        )
    if not key.exists():
        RunKey.create().save(key)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with KvServers(
        addresses, RunKey.load(key), numbers=[number], register=store, dead_after_s=dead_after
    ) as servers:
        servers.wait_until_listening()
        copies = "with a copy of each shard on another server" if store else "without copies"
        print(f"server {number} of {len(addresses)} at {addresses[number]}, {copies}; key in {key}", flush=True)
        threading.Event().wait()
