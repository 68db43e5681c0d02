"""The `script` role: run any script in a world, under the variables that torchrun would set."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from shoal.comm.channel import Channel
from shoal.comm.words import TO_PROCESSES, Stop, understood
from shoal.errors import LaunchError
from shoal.observe.happenings import Done, StateEntered
from shoal.roles.beat import Beat
from shoal.roles.pulse import Pulse
from shoal.spec import Job, World
from shoal.spec.vocabulary import State
from shoal.spec.world import ARENA_VARIABLE, SOCKETS_VARIABLE


def run_script(job: Job, world: World, channel: Channel) -> int:
    """Run the script `job.target` as `__main__`; what it raises passes through."""
    script = Path(job.target)
    if not script.is_file():
        raise LaunchError(f"The script {job.target!r} is not a file in {Path.cwd()}; check the path.")
    os.environ.update(script_environment(job, world))
    sys.argv = [job.target, *job.options.get("argv", [])]
    sys.path.insert(0, str(script.resolve().parent))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in any script
    with Beat(channel, Pulse(State.SCRIPT), on_message=_obey):
        channel.send(StateEntered(state=State.READY).as_message())
        runpy.run_path(job.target, run_name="__main__")
        channel.send(Done(results={}).as_message())
    return 0


def script_environment(job: Job, world: World) -> dict[str, str]:
    """The variables that torchrun sets, so that its scripts run here unchanged."""
    address, _, port = world.coordinator.partition(":")
    rank, size = str(world.global_rank), str(world.world_size)
    arena = {} if world.arena_fd is None else {ARENA_VARIABLE: str(world.arena_fd)}
    return {
        **arena,
        SOCKETS_VARIABLE: world.sockets,
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "shoal",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": str(job.cluster.threads_per_worker),
    }


def _obey(message: dict[str, Any]) -> None:
    # A script knows nothing of our messages: it is stopped the way Ctrl-C would stop it.
    if isinstance(understood(message, TO_PROCESSES), Stop):
        os.kill(os.getpid(), signal.SIGINT)
