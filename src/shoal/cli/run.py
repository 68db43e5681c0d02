"""`shoal run`: start any script several times, as one world."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.arguments import CLUSTER, Interface, LinkOption, Port, Ports, Threads, TrustedNetwork, given
from shoal.errors import SpecError

ScriptWorkers = Annotated[
    str,
    typer.Option(
        "--workers",
        "-w",
        "-n",
        help="Processes; with --horovod also 1:4: an elastic script, with 1 to 4.",
        metavar="N|LEAST:MOST",
        rich_help_panel=CLUSTER,
    ),
]
Horovod = Annotated[
    bool,
    typer.Option(
        "--horovod",
        help="What the script imports as horovod.torch or horovod.keras is Shoal's.",
        rich_help_panel=CLUSTER,
    ),
]
ScriptStrategy = Annotated[
    str,
    typer.Option(
        "--strategy",
        "-s",
        help="How its Trainers train that name no strategy: name:key=value,…; what servers it has are started.",
        rich_help_panel=CLUSTER,
    ),
]
ScriptOn = Annotated[
    str,
    typer.Option(
        "--on",
        help="local, ssh:a,b, hosts:FILE, join:2, mpi:a,b, slurm, ray, or local:2 (here, as if on 2 hosts).",
        metavar="ENGINE",
        rich_help_panel=CLUSTER,
    ),
]
KvServersCount = Annotated[
    int,
    typer.Option(
        "--servers",
        min=0,
        help="Servers of a key-value store beside the workers, for kv.create in the script.",
        rich_help_panel=CLUSTER,
    ),
]


def run(
    ctx: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python script.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="What the script is given.", show_default=False)
    ] = None,
    workers: ScriptWorkers = "1",
    strategy: ScriptStrategy = "data",
    servers: KvServersCount = 0,
    on: ScriptOn = "local",
    interface: Interface = None,
    ports: Ports = None,
    trusted_network: TrustedNetwork = None,
    link: LinkOption = None,
    port: Port = None,
    threads: Threads = None,
    horovod: Horovod = False,
) -> None:
    """Start a script once per worker, under the variables that torchrun sets.

    Options of Shoal come before the script; what follows it is the script's.
    With several workers each line of output is shown after its worker's rank.
    The exit status is that of the worker that failed.
    With a strategy that has servers, these run the script, too, up to its `Trainer.fit()`.
    With --on workers run on several hosts; a Trainer needs one.

    With --servers the store of its `kv.create` is held by processes that outlive any worker.
    With --horovod a script written for Horovod runs as it is; with --workers 1:4, an elastic one.

    [dim]shoal run --workers 2 loop.py --lr 0.1[/dim]
    [dim]shoal run --horovod -n 4 mnist.py[/dim]
    """
    from shoal.launch.scripts import run_script
    from shoal.observe import Event
    from shoal.observe.happenings import Decided, HostGone, Hung, LineSaid, Lost, Replaced, Warned, WorldFormed
    from shoal.observe.wording import line
    from shoal.spec import Cluster

    def show(event: Event) -> None:
        # Also for one worker: nobody should have to guess which world was formed.
        if isinstance(event.what, WorldFormed | Warned | LineSaid):
            print(event.what.text, file=sys.stderr)
        elif (
            isinstance(event.what, Hung | Lost | HostGone | Replaced | Decided)
            and (text := line(event)) is not None
        ):
            print(text, file=sys.stderr)

    least, most = _limits(workers, horovod=horovod)
    network = given(interface=interface, ports=ports, trusted_network=trusted_network, link=link)
    if servers and on != "local":
        raise SpecError(
            f"--servers are processes of this host, but --on {on} has others; start servers with `shoal kv "
            "serve`, and name them in kv.create."
        )
    if least is not None:
        if servers:
            raise SpecError("--servers is for scripts of a fixed number of workers, not for elastic ones.")
        if on != "local" or network:
            raise SpecError(
                f"--workers {workers} is for elastic scripts, whose workers come and go on one host, but --on "
                f"{on} was asked for; give one number, or leave --on out."
            )
        from shoal.horovod.elastic.driver import ElasticLimits
        from shoal.horovod.run import start_elastic

        limits = ElasticLimits(workers=most, least=least, most=most)
        start_elastic(script, arguments or (), limits=limits, threads=threads, zygote=ctx.obj)
        return
    cluster = Cluster(workers=most, on=on, **network, port=port, threads=threads)
    with _kv_servers(servers) as variables:
        if horovod and cluster.is_remote:
            from shoal.horovod.run import carried_variables

            variables = carried_variables()
        run_script(
            script,
            arguments or (),
            cluster=cluster,
            strategy=strategy,
            before="shoal.horovod.names" if horovod else None,
            variables=variables,
            on_event=show,
            zygote=ctx.obj,
        )


@contextmanager
def _kv_servers(count: int) -> Iterator[dict[str, str]]:
    """Servers of a key-value store while the script runs, and the variables by which it finds them."""
    if not count:
        yield {}
        return
    from shoal.kv.servers import SERVERS_VARIABLE, KvServers

    with KvServers.of_this_host(count) as servers:
        yield {SERVERS_VARIABLE: servers.place.text}


def _limits(workers: str, *, horovod: bool) -> tuple[int | None, int]:
    """How many there are at least, where that may change, and at most."""
    least, colon, most = workers.partition(":")
    if not colon and least.isdecimal():
        return None, int(least)
    if not (least.isdecimal() and most.isdecimal()):
        raise SpecError(f"--workers is a number of processes, or LEAST:MOST with --horovod, found {workers!r}.")
    if not horovod:
        raise SpecError(
            f"--workers {workers} is for elastic scripts, which need --horovod; give one number, or use `shoal "
            "train`."
        )
    return int(least), int(most)
