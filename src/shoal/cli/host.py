"""`shoal host`: let this machine take part in a run."""

from __future__ import annotations

import os
import signal
from typing import Annotated

import typer


def host(
    join: Annotated[
        str | None,
        typer.Option(help="Where the run's supervisor listens, as it says itself.", metavar="tcp://HOST:PORT"),
    ] = None,
    ticket: Annotated[
        str,
        typer.Option(
            help="The file with the run's key, which nobody else may read; - for standard input.", metavar="FILE|-"
        ),
    ] = "-",
    name: Annotated[
        str, typer.Option(help="What to call this host; default its own name.", show_default=False)
    ] = "",
    cores: Annotated[
        int | None, typer.Option(min=1, help="How many cores to give; default all that this process may use.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="How many workers to have at most; default this host's share.")
    ] = None,
    interface: Annotated[
        str, typer.Option(help="The network on which other hosts reach this one; default by route.")
    ] = "",
    ports: Annotated[
        str, typer.Option(help="Where processes may listen, as 20000-20100; default any free port.")
    ] = "",
    probe: Annotated[
        str,
        typer.Option(
            help="Say whether the agent of this host lives, by the file that SHOAL_SIGN names for it; status 1 "
            "where it does not.",
            metavar="FILE",
            show_default=False,
        ),
    ] = "",
    joined: Annotated[
        bool, typer.Option("--joined", help="With --probe: and takes part in a run.", show_default=False)
    ] = False,
    owner: Annotated[
        int | None, typer.Option(help="The process that has started this one, to end with it.", metavar="PID")
    ] = None,
) -> None:
    """Let this machine take part in a run that waits for hosts, until the run is over.

    Whoever started it with --on ssh:a,b has this done by ssh; with --on join:2 it is done by hand, on each host.

    [dim]shoal train digits.py -w 4 --strategy ps --on join:2
    shoal host --join tcp://10.0.0.1:40123 --ticket ticket[/dim]
    """
    if probe:
        from shoal.launch.remote.probing import probe as state_of

        typer.echo(state_of(probe, wants_joined=joined))
        return
    if join is None:
        raise typer.BadParameter("say where the run's supervisor listens.", param_hint="--join")
    from shoal.comm.kernel import die_with_parent
    from shoal.launch.remote.agent import join as take_part
    from shoal.launch.remote.starting import read_ticket

    if "SLURM_STEP_ID" in os.environ:
        leave_signals_to_the_first()  # Slurm signals all steps of a job, and the script with the supervisor.
    else:  # So that what runs here is ended, and nothing left behind.
        signal.signal(signal.SIGTERM, lambda *_: exit_quietly())
    if owner is not None:
        die_with_parent(owner, signal.SIGTERM)
    key = read_ticket(ticket)
    take_part(join, key, name=name, interface=interface, ports=ports, cores=cores, workers=workers)


def leave_signals_to_the_first() -> None:
    """Launchers signal all processes at once. The first ends the run, and others with it; who is asked twice,
    ends."""
    asked = []

    def take(signum: int, frame: object) -> None:
        asked.append(signum)
        if len(asked) > 1:
            raise SystemExit(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, take)


def exit_quietly() -> None:
    """Leave as whoever is asked to."""
    raise SystemExit(128 + signal.SIGTERM)
