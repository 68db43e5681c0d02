"""What a process of a run is: it receives a job and its place in the world, and works until it is done."""

from __future__ import annotations

import sys
from collections.abc import Callable

from shoal.comm.channel import Channel
from shoal.errors import PeerLost
from shoal.roles.process.failure import describe_failure
from shoal.spec import Job, World
from shoal.spec.vocabulary import Purpose, Role

OK, FAILED, INTERRUPTED = 0, 1, 130

Main = Callable[[Job, World, Channel], int]
"""What a process does from its first to its last line."""


def run(job: Job, world: World, channel: Channel) -> int:
    """Do what `job` asks of this process and return its exit code; a failure is told once, as `failed`."""
    try:
        import torch

        torch.set_num_threads(job.cluster.threads_per_worker)
        return _main_of(job, world)(job, world, channel)
    except SystemExit as request:
        return _exit_code(request)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        tell_failure(error, world, channel)
        return FAILED


def tell_failure(error: Exception, world: World, channel: Channel) -> None:
    """Tell the supervisor, and this process's log, why this process cannot go on."""
    failure = describe_failure(error, world)
    print(failure.traceback or failure.message, file=sys.stderr, flush=True)
    try:
        channel.send(failure.as_message())
    except PeerLost:
        pass  # There is nobody left to tell; the log has it.


def _main_of(job: Job, world: World) -> Main:
    # Imported on demand: a script needs nothing of what training needs.
    if job.purpose == Purpose.SCRIPT:  # also in servers, which find their task there
        from shoal.roles.script import run_script

        return run_script
    if world.role == Role.SERVER:
        from shoal.roles.server import run_server

        return run_server
    if world.role in (Role.COORDINATOR, Role.STANDBY):
        from shoal.roles.coordinator import run_coordinator

        return run_coordinator
    from shoal.roles.worker import run_worker

    return run_worker


def _exit_code(request: SystemExit) -> int:
    """What Python itself would make of `sys.exit(…)`."""
    if request.code is None:
        return OK
    if isinstance(request.code, int):
        return request.code & 0xFF
    print(request.code, file=sys.stderr, flush=True)
    return FAILED
