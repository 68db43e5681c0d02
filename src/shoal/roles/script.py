"""The `script` role: run any script in a world, under the variables that torchrun would set.

Where the run has servers, they and their coordinator run the script, too: only there is the task that they serve.
Its `Trainer.fit()` serves in them, and ends them.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from shoal.comm.channel import Channel
from shoal.comm.words import TO_PROCESSES, MetAll, Stop, understood
from shoal.errors import LaunchError
from shoal.observe.happenings import Done, StateEntered
from shoal.roles.process.beat import Beat
from shoal.roles.process.reporter import Reporter
from shoal.roles.process.station import ScriptMeetings, Station, take_station
from shoal.roles.process.torch_groups import groups_outlive_objects
from shoal.spec import Job, World
from shoal.spec.vocabulary import Role, State
from shoal.spec.world import ARENA_VARIABLE, SOCKETS_VARIABLE

_NO_RANK = -1
"""The RANK of servers and coordinator: they are none of the WORLD_SIZE that train."""


def run_script(job: Job, world: World, channel: Channel) -> int:
    """Run the script `job.target` as `__main__`; what it raises passes through."""
    script = Path(job.target)
    if not script.is_file():
        raise LaunchError(f"The script {job.target!r} is not a file in {Path.cwd()}; check the path.")
    os.environ.update(script_environment(job, world))
    sys.argv = [job.target, *job.options.get("argv", [])]
    sys.path.insert(0, str(script.resolve().parent))
    if (before := job.options.get("before")) is not None:
        importlib.import_module(before).prepare()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in any script
    reporter, is_worker = Reporter(world, channel), world.role == Role.WORKER
    reporter.pulse.enter(State.SCRIPT)
    meetings = ScriptMeetings(reporter)
    station = Station(job=job, world=world, channel=channel, reporter=reporter, meetings=meetings)
    take_station(station)
    # What servers and coordinator are told, they read themselves as soon as they serve.
    with Beat(channel, reporter.pulse, on_message=partial(_obey, meetings) if is_worker else None):
        if is_worker:
            reporter.send(StateEntered(state=State.READY))
        with groups_outlive_objects():
            _run_to_its_end(job.target)
        station.check_begun()
        if is_worker:
            reporter.send(Done(results={}))
    return 0


def _run_to_its_end(script: str) -> None:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as request:
        if request.code not in (None, 0):
            raise


def script_environment(job: Job, world: World) -> dict[str, str]:
    """The variables that torchrun sets, so that its scripts run here unchanged."""
    address, _, port = world.coordinator.rpartition(":")
    is_worker = world.role == Role.WORKER
    rank, size = str(world.global_rank if is_worker else _NO_RANK), str(world.world_size)
    alike = {Role.WORKER: world.world_size, Role.SERVER: job.conduct.servers}.get(world.role, 1)
    arena = {} if world.arena_fd is None else {ARENA_VARIABLE: str(world.arena_fd)}
    host, hosts = world.host_among_workers
    return {
        **arena,
        **job.options.get("variables", {}),
        SOCKETS_VARIABLE: world.sockets,
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(world.local_rank if is_worker else _NO_RANK),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "NODE_RANK": str(host),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(hosts),
        "ROLE_NAME": "default" if is_worker else world.role,
        "ROLE_RANK": str(world.global_rank),
        "ROLE_WORLD_SIZE": str(alike),
        "MASTER_ADDR": address.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "shoal",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": str(job.cluster.threads_per_worker),
    }


def _obey(meetings: ScriptMeetings, message: dict[str, Any]) -> None:
    match understood(message, TO_PROCESSES):
        case Stop():
            # A script knows nothing of our messages: it is stopped the way Ctrl-C would stop it.
            os.kill(os.getpid(), signal.SIGINT)
        case MetAll() as word:
            meetings.hear(word)
