"""`shoal train` in processes that somebody else has started: one of them trains, the others wait for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.cli.failures import status_of
from shoal.cli.host import exit_quietly, leave_signals_to_the_first
from shoal.comm.security import RunKey
from shoal.errors import INTERRUPTED, ShoalError
from shoal.launch.engines.found import AUTO, Found, FoundRank
from shoal.launch.engines.meeting import Follower, Leader
from shoal.launch.engines.notes import HostShare, MeetingFolder, TicketLeft
from shoal.launch.owner import ZYGOTE_VARIABLE
from shoal.observe.wording import plural

if TYPE_CHECKING:
    from shoal.launch.owner import ZygoteProcess

_OTHERWISE = "--on local trains in this process's host alone"


@contextmanager
def taking_part(
    found: Found | None, said: dict[str, Any], runs: Path, zygote: ZygoteProcess | None, *, to_stderr: bool
) -> Iterator[None]:
    """Put into `said` what the world that was found says of where and how to train, and the user does not.

    In all processes but the first this ends with the run's exit status, and nothing is trained here.
    """
    cluster = said["cluster"]
    if found is None:
        if cluster.get("on") == AUTO:
            cluster["on"] = "local"
        yield
        return
    if not isinstance(found, FoundRank):
        _tell(f"found: {plural(found.count, 'host')} by {found.by}; {_OTHERWISE}", to_stderr)
        cluster["on"] = found.on if found.count > 1 else "local"
        cluster.setdefault("workers", found.workers)
        yield
        return
    if zygote is not None:
        os.environ[ZYGOTE_VARIABLE] = zygote.name  # For the agent of this host, which is to fork from it.
    folder, cores = MeetingFolder.of(found, runs), sorted(os.sched_getaffinity(0))
    if found.rank != 0:
        raise typer.Exit(_follow(found, folder, cores, zygote))
    with _leading(Leader(found, folder, cores), to_stderr) as leader:
        spread_over(leader.hosts[0].cores, zygote)
        _tell(f"{_description(found, leader.hosts)}; {_OTHERWISE}", to_stderr)
        cluster["on"] = "local" if len(leader.hosts) == 1 else f"ranks:{folder.path}"
        cluster.setdefault("workers", found.workers)
        if found.servers and said["strategy"] is None:
            said["strategy"] = f"ps:servers={found.servers}"
        yield


@contextmanager
def _leading(leader: Leader, to_stderr: bool) -> Iterator[Leader]:
    """The others end with the status that this process ends with."""
    status = 1
    # Until the run heeds it: who is ended while it waits tells the others.
    before = signal.signal(signal.SIGTERM, lambda *_: exit_quietly())
    try:
        leader.gather(lambda text: _tell(text, to_stderr))
        signal.signal(signal.SIGTERM, before)
        yield leader
        status = 0
    except ShoalError as error:
        status = status_of(error)
        raise
    except (KeyboardInterrupt, SystemExit):
        status = INTERRUPTED
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        leader.end(status)


def _follow(found: FoundRank, folder: MeetingFolder, cores: list[int], zygote: ZygoteProcess | None) -> int:
    """Wait, as an agent or for nothing, until the run is over; its status."""
    if found.rank is None:
        _tell(
            f"{found.by}: workers evaluate themselves; this process waits for the end of the run", to_stderr=True
        )
    leave_signals_to_the_first()

    def serve(share: HostShare, ticket: TicketLeft) -> None:
        from shoal.launch.remote.agent import join

        spread_over(share.cores, zygote)
        key = RunKey.from_text(ticket.key)
        join(ticket.address, key, name=share.name, ports=ticket.ports, workers=share.workers)

    return Follower(found, folder, cores).follow(serve)


def spread_over(cores: list[int], zygote: ZygoteProcess | None) -> None:
    """Launchers bind each rank to its cores; a host's workers are to have those of all its ranks."""
    for pid in (0, *([zygote.pid] if zygote is not None else [])):
        try:
            os.sched_setaffinity(pid, cores)
        except OSError:
            pass  # They are slower then.


def _description(found: FoundRank, hosts: list[HostShare]) -> str:
    servers = f" and {plural(found.servers, 'server')}" if found.servers else ""
    return f"found: {plural(found.workers, 'worker')}{servers} on {plural(len(hosts), 'host')} by {found.by}"


def _tell(text: str, to_stderr: bool) -> None:
    typer.echo(text, err=to_stderr)
