"""The local engine: processes of this host, forked from a zygote, sharing one arena."""

from __future__ import annotations

import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.comm.channel import Channel
from shoal.errors import LaunchError, PeerLost, ProtocolError
from shoal.launch.deaths import signal_name
from shoal.launch.echo import Echo
from shoal.launch.engine import Member
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess, connect, start_zygote
from shoal.spec import Job, World

_END_TIMEOUT_S = 5.0
_TAIL_BYTES, _TAIL_LINES = 8192, 20


class LocalEngine:
    """Forks a job's processes from a zygote: the one given, the one that SHOAL_ZYGOTE names, or its own."""

    def __init__(self, zygote: ZygoteProcess | None = None, *, echo: Echo | None = None) -> None:
        self._zygote = zygote
        self._echo = echo

    def start(self, job: Job, worlds: Sequence[World]) -> LocalHandle:
        """Ask for one process per world."""
        name = self._zygote.name if self._zygote is not None else os.environ.get(ZYGOTE_VARIABLE)
        private = None if name else start_zygote()
        try:
            channel = connect(name or private.name)  # type: ignore[union-attr]
            handle = LocalHandle(job, channel, private, self._echo)
        except BaseException:
            if private is not None:
                private.close()
            raise
        try:
            for world in worlds:
                handle.add(world)
        except BaseException:
            handle.close()
            raise
        return handle


class LocalHandle:
    """The processes of one run on this host."""

    def __init__(self, job: Job, zygote: Channel, private: ZygoteProcess | None, echo: Echo | None) -> None:
        self.members: list[Member] = []
        self._job = job
        self._zygote = zygote
        self._private = private
        self._echo = echo
        self._logs: list[int] = []
        self._pidfds: dict[int, int] = {}
        # No name in any file system: it is gone when the last process that holds it is.
        self._arena_fd = os.memfd_create("shoal-arena")

    def fileno(self) -> int:
        """The zygote's connection."""
        return self._zygote.fileno()

    def add(self, world: World) -> Member:
        """Ask the zygote for one more process."""
        stem = "rank" if world.role == "worker" else world.role
        log_fd, log_name = self._open_log(stem, world.global_rank)
        self._logs.append(log_fd)
        ours, theirs = Channel.pair()
        member = Member(world.role, world.global_rank, ours, log_name, node=world.node, places=world.places)
        self.members.append(member)
        try:
            self._zygote.send(self._request(world), [log_fd, theirs.fileno(), self._arena_fd])
        except PeerLost:
            raise self._zygote_lost() from None
        except ProtocolError as error:
            raise LaunchError(f"The job and the environment are too big to hand over: {error}") from None
        finally:
            theirs.close()
        return member

    def collect(self) -> list[Member]:
        """What the zygote has said since the last call."""
        changed = []
        try:
            while (received := self._zygote.poll_with_fds()) is not None:
                changed.append(self._take(*received))
        except PeerLost:
            raise self._zygote_lost() from None
        return changed

    def signal(self, member: Member, signum: int) -> None:
        """Send a signal to a member, if it still lives."""
        if member.is_alive and member.pid is not None:
            try:
                signal.pidfd_send_signal(self._pidfds[member.pid], signum)
            except ProcessLookupError:
                pass

    def wait(self, timeout_s: float) -> bool:
        """Wait until every member has ended."""
        deadline = time.monotonic() + timeout_s
        while any(member.is_alive for member in self.members):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            select.select([self], [], [], left_s)
            self.collect()
        return True

    def last_output(self, member: Member) -> str:
        """The last lines of its log; nothing where they were shown as they came."""
        if self._echo is not None:
            return ""
        log_fd = self._logs[self.members.index(member)]
        start = max(0, os.fstat(log_fd).st_size - _TAIL_BYTES)
        text = os.pread(log_fd, _TAIL_BYTES, start).decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def close(self) -> None:
        """Kill what still runs, wait until it is gone, give back every file."""
        if self._private is not None:
            self._private.close()
        self._hang_up()
        for member in self.members:
            if member.is_alive and member.pid is not None:
                _end_group(member.pid, self._pidfds[member.pid])
            member.channel.close()
        for fd in (*self._logs, *self._pidfds.values(), self._arena_fd):
            os.close(fd)

    def _request(self, world: World) -> dict[str, Any]:
        return {
            "kind": "spawn",
            "id": len(self.members) - 1,
            "job": self._job.to_json(),
            "world": asdict(world),
            "env": dict(os.environb),
            "cwd": os.getcwdb(),
            "path": sys.path,
        }

    def _take(self, message: dict[str, Any], fds: list[int]) -> Member:
        if message["kind"] == "spawned":
            member = self.members[message["id"]]
            member.pid = message["pid"]
            self._pidfds[message["pid"]] = fds[0]
        elif message["kind"] == "exited":
            member = next(one for one in self.members if one.pid == message["pid"] and one.is_alive)
            member.exit_code = message["code"]
        else:
            raise LaunchError(f"No process could be started: {message['text']}.")
        return member

    def _hang_up(self) -> None:
        """Hang up on the zygote. It does the same once it has killed and reaped our processes."""
        self._zygote.finish()
        deadline = time.monotonic() + _END_TIMEOUT_S
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                select.select([self._zygote], [], [], left_s)
                if (received := self._zygote.poll_with_fds()) is not None:
                    self._take(*received)
        except (PeerLost, LaunchError):
            pass
        self._zygote.close()

    def _open_log(self, stem: str, number: int) -> tuple[int, str]:
        if self._echo is not None:
            return self._echo.open(str(number)), ""
        if not self._job.run_dir:
            fd, path = tempfile.mkstemp(prefix="shoal-")
            os.unlink(path)  # Only for `last_output`: this run keeps nothing.
            return fd, ""
        folder, name = Path(self._job.run_dir) / "logs", f"{stem}-{number}.log"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            return os.open(folder / name, flags, 0o644), str(folder / name)
        except OSError as error:
            raise LaunchError(
                f"The log {folder / name} cannot be written ({error.strerror}); choose another run folder."
            ) from None

    def _zygote_lost(self) -> LaunchError:
        code = self._private.exit_code if self._private is not None else None
        how = f" ({signal_name(-code)})" if code is not None and code < 0 else ""
        return LaunchError(
            f"The zygote, from which workers are forked, has ended{how}, and the workers with it; "
            "start the run again."
        )


def _end_group(pid: int, pidfd: int) -> None:
    """End a process whose parent is gone, and those it started; wait until it is no more."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    select.select([pidfd], [], [], _END_TIMEOUT_S)
