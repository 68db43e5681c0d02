"""From fork to work: what a zygote's child does before and after its role runs."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import os
import random
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

from shoal.comm.channel import Channel
from shoal.comm.kernel import die_with_parent, name_process
from shoal.errors import LaunchError
from shoal.launch.inside import become_member
from shoal.launch.log_file import open_log
from shoal.spec import Job, World
from shoal.spec.vocabulary import Purpose


@dataclass(frozen=True, kw_only=True)
class Birth:
    """What a child is born for. Its file descriptors are its own."""

    job: str
    world: dict[str, Any]
    env: dict[bytes, bytes]
    cwd: bytes
    path: list[str]
    log_fd: int
    channel_fd: int
    arena_fd: int | None
    shelf_fds: tuple[int, ...]
    parent_pid: int

    @classmethod
    def from_request(cls, request: dict[str, Any], fds: list[int], *, parent_pid: int) -> Birth:
        """What a client's `spawn` message asks for."""
        log_fd, channel_fd, *arena = fds
        return cls(
            **{name: request[name] for name in ("job", "world", "env", "cwd", "path")},
            log_fd=log_fd,
            channel_fd=channel_fd,
            arena_fd=arena[0] if arena else None,
            shelf_fds=tuple(arena[1:]),
            parent_pid=parent_pid,
        )


def live(birth: Birth) -> NoReturn:
    """Become the process that `birth` describes, do its work, and end."""
    code = 1
    try:
        die_with_parent(birth.parent_pid, signal.SIGKILL)
        os.setsid()
        # A signal to this process alone is its death, which others follow; Ctrl-C goes to the supervisor.
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)
        _take_files(birth)
        code = _work(birth)
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)


def _take_files(birth: Birth) -> None:
    """Standard output and error go to the log; of all other files only the channel, arena and shelf stay."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (birth.log_fd, 1), (birth.log_fd, 2)):
        os.dup2(source, target)
    keep = {0, 1, 2, birth.channel_fd, birth.arena_fd, *birth.shelf_fds}
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd not in keep:
            try:
                os.close(fd)
            except OSError:
                pass  # The one that listed this folder.
    sys.stdout, sys.stderr = (open_log(fd) for fd in (1, 2))
    faulthandler.enable()


def _work(birth: Birth) -> int:
    from shoal import roles

    channel = Channel.from_fd(birth.channel_fd)
    world = World(**{**birth.world, "arena_fd": birth.arena_fd, "shelf_fds": birth.shelf_fds})
    try:
        _settle(birth)
        job = Job.from_json(birth.job)  # which may name a strategy from a package that only the supervisor finds
        _take_place(job, world)
    except Exception as error:
        roles.tell_failure(error, world, channel)
        return roles.FAILED
    return roles.run(job, world, channel)


def _settle(birth: Birth) -> None:
    """Take over the supervisor's surroundings, and nothing of the zygote's."""
    os.environb.clear()
    os.environb.update(birth.env)
    try:
        os.chdir(birth.cwd)
    except OSError as error:
        raise LaunchError(
            f"The working directory {os.fsdecode(birth.cwd)!r} cannot be entered ({error.strerror}); "
            "start the run from a directory that exists."
        ) from None
    sys.path[:] = birth.path
    importlib.invalidate_caches()


def _take_place(job: Job, world: World) -> None:
    """Be known, to others and to the task, as what this process is in its run."""
    os.environ["SHOAL_ROLE"], os.environ["SHOAL_RANK"] = world.role, str(world.global_rank)
    sys.argv[:] = [job.target]
    if job.purpose != Purpose.SCRIPT:  # whose file is nobody's task
        become_member(f"{world.role} {world.global_rank}")
    name_process(f"shoal-{world.role}-{world.global_rank}")
    # Forks share what was random in the parent; torch starts from a constant in any case.
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _end(code: int) -> NoReturn:
    """End as Python would, save the slow part: freeing every module, of which the parent has most."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
