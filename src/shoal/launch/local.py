"""This host: processes forked from a zygote, sharing one arena."""

from __future__ import annotations

import os
import select
import selectors
import signal
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from shoal.arena.shelf import FdShelf
from shoal.comm.channel import Channel
from shoal.comm.socket_folder import SocketFolder
from shoal.comm.words import StacksOffered
from shoal.errors import LaunchError, PeerLost, ProtocolError
from shoal.launch import load
from shoal.launch.deaths import signal_name
from shoal.launch.echo import Echo
from shoal.launch.links import Links
from shoal.launch.memory_watch import MemoryWatch
from shoal.launch.messages import Deaf, Ended, Load, News, Said, Sight, Started
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess, connect, start_zygote
from shoal.launch.preloading import modules_for
from shoal.launch.stacks import StackSource, collect_stacks, explain_state
from shoal.launch.this_host import facts_of_this_host
from shoal.launch.zygote_line import ZygoteLine
from shoal.spec import Job, World
from shoal.spec.host_facts import HostFacts
from shoal.spec.told import Told
from shoal.spec.vocabulary import Role

_END_TIMEOUT_S = 5.0
_TAIL_BYTES, _TAIL_LINES = 8192, 20


class LocalEngine:
    """Forks a job's processes from a zygote: the one given, the one that SHOAL_ZYGOTE names, or its own."""

    def __init__(self, zygote: ZygoteProcess | None = None, *, echo: Echo | None = None) -> None:
        self._zygote = zygote
        self._echo = echo

    def reserve(self, job: Job) -> list[LocalHost]:
        """This host alone."""
        return [self.open(job)]

    def open(self, job: Job) -> LocalHost:
        """This host, for one job."""
        name = self._zygote.name if self._zygote is not None else os.environ.get(ZYGOTE_VARIABLE)
        private = None if name else start_zygote()
        try:
            channel = connect(name or private.name)  # type: ignore[union-attr]
            return LocalHost(job, channel, private, self._echo)
        except BaseException:
            if private is not None:
                private.close()
            raise


@dataclass
class LocalProcess:
    """What this host knows of one process."""

    log_fd: int
    log_name: str
    """Where its output is, for people."""
    pid: int | None = None
    """None until it has been started."""
    pidfd: int = -1
    is_alive: bool = True
    stacks: StackSource | None = None
    """How to ask it where it is; None until it has said so."""


class LocalHost:
    """The processes of one run on this host."""

    def __init__(self, job: Job, zygote: Channel, private: ZygoteProcess | None, echo: Echo | None) -> None:
        self.processes: dict[int, LocalProcess] = {}
        self._job = job
        self._zygote = ZygoteLine(zygote)
        self._private = private
        self._echo = echo
        self.sockets = SocketFolder()
        self._links = Links()
        self._memory = MemoryWatch()
        self._selector = selectors.EpollSelector()
        self._selector.register(self._zygote, selectors.EVENT_READ)
        self._selector.register(self._links, selectors.EVENT_READ)
        # No name in any file system: it is gone when the last process that holds it is.
        self.arena_fd = os.memfd_create("shoal-arena")
        # Memory of a GPU that workers share lies here for whoever comes next; this process never opens it.
        self._shelf = FdShelf.make()
        self._shares_gpu = job.cluster.device != "cpu" and job.conduct.has_places

    @cached_property
    def facts(self) -> HostFacts:
        """Of this machine."""
        return facts_of_this_host()

    def fileno(self) -> int:
        """The zygote's connection and all channels in one."""
        return self._selector.fileno()

    def start(self, process: int, world: World) -> None:
        """Ask the zygote for one more process."""
        stem = "rank" if world.role == Role.WORKER else world.role
        started = self.processes[process] = LocalProcess(*self._open_log(stem, world.global_rank))
        theirs = self._links.open(process)
        fds = [started.log_fd, theirs.fileno(), self.arena_fd, *(self._shelf.fds if self._shares_gpu else ())]
        try:
            self._zygote.send(self._request(process, world), fds, then=theirs.close)
        except PeerLost:
            raise self._zygote_lost() from None
        except ProtocolError as error:
            raise LaunchError(f"The job and the environment are too big to hand over: {error}") from None

    def collect(self) -> list[News]:
        """What processes and the zygote have said since the last call."""
        # Words before deaths: the last word of a process explains its end.
        news: list[News] = list(self._heard(self._links.collect()))
        try:
            for received in self._zygote.collect():
                news += self._take(*received)
        except PeerLost:
            raise self._zygote_lost() from None
        return news

    def say(self, process: int, word: Told) -> None:
        """Say something to a process, if it still lives."""
        self._links.say(process, word)

    def signal(self, process: int, signum: int) -> None:
        """Send a signal to a process, if it still lives."""
        target = self.processes[process]
        if target.is_alive and target.pid is not None:
            try:
                signal.pidfd_send_signal(target.pidfd, signum)
            except ProcessLookupError:
                pass

    def look_into(self, processes: Collection[int]) -> dict[int, Sight]:
        """The stacks of these processes, and why those that do not run don't."""
        known = {number: self.processes[number] for number in processes}
        by_pid = {one.pid: number for number, one in known.items()}
        sources = [one.stacks for one in known.values() if one.stacks is not None]
        stacks = collect_stacks(sources, lambda source: self.signal(by_pid[source.pid], source.signum))
        return {
            number: Sight(stacks=stacks.get(one.pid, ""), state=explain_state(one.pid))
            for number, one in known.items()
            if one.pid is not None
        }

    def measure_load(self) -> Load:
        """The load of this machine since the last call."""
        return load.read_load()

    def close(self) -> None:
        """Kill what still runs, wait until it is gone, give back every file."""
        if self._private is not None:
            self._private.close()
        self._hang_up()
        self._links.close()
        self._selector.close()
        for one in self.processes.values():
            if one.is_alive and one.pid is not None:
                _end_group(one.pid, one.pidfd)
            for fd in (one.log_fd, *([one.pidfd] if one.pid is not None else [])):
                os.close(fd)
        self.sockets.close()
        os.close(self.arena_fd)
        self._shelf.close()

    def _request(self, process: int, world: World) -> dict[str, Any]:
        return {
            "kind": "spawn",
            "id": process,
            "job": self._job.to_json(),
            "world": asdict(replace(world, sockets=self.sockets.path)),
            "env": dict(os.environb),
            "cwd": os.getcwdb(),
            "path": sys.path,
            "modules": modules_for(self._job, world),
        }

    def _heard(self, said: Iterable[Said | Deaf]) -> Iterator[Said | Deaf]:
        """What is meant for the supervisor. How to see a process's stacks is this host's business."""
        for news in said:
            if isinstance(news, Said) and isinstance(offer := news.word, StacksOffered):
                source = StackSource(pid=offer.pid, signum=offer.signal, fd=offer.fd)
                self.processes[news.process].stacks = source
            else:
                yield news

    def _take(self, message: dict[str, Any], fds: list[int]) -> list[News]:
        if message["kind"] == "spawned":
            process = message["id"]
            self.processes[process].pid, self.processes[process].pidfd = message["pid"], fds[0]
            return [Started(process)]
        if message["kind"] == "exited":
            living = {one.pid: number for number, one in self.processes.items() if one.is_alive}
            process, code = living[message["pid"]], message["code"]
            self.processes[process].is_alive = False
            end = Ended(
                process=process,
                exit_code=code,
                log_name=self.processes[process].log_name,
                last_output=self._last_output(process),
                ran_out_of_memory=code == -signal.SIGKILL and self._memory.ran_out(),
            )
            return [*self._heard(self._links.drain(process)), end]
        raise LaunchError(f"No process could be started: {message['text']}.")

    def _last_output(self, process: int) -> str:
        """The last lines of its log; nothing where they were shown as they came."""
        if self._echo is not None:
            return ""
        log_fd = self.processes[process].log_fd
        start = max(0, os.fstat(log_fd).st_size - _TAIL_BYTES)
        text = os.pread(log_fd, _TAIL_BYTES, start).decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def _hang_up(self) -> None:
        """Hang up on the zygote. It does the same once it has killed and reaped our processes."""
        try:
            for received in self._zygote.hang_up(_END_TIMEOUT_S):
                self._take(*received)
        except LaunchError:
            pass
        self._zygote.close()

    def _open_log(self, stem: str, number: int) -> tuple[int, str]:
        if self._echo is not None:
            return self._echo.open(str(number) if stem == "rank" else f"{stem} {number}"), ""
        if not self._job.run_dir:
            fd, path = tempfile.mkstemp(prefix="shoal-")
            os.unlink(path)  # Only for `last_output`: this run keeps nothing.
            return fd, ""
        folder, name = Path(self._job.run_dir) / "logs", f"{stem}-{number}.log"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            return os.open(folder / name, flags, 0o644), str(folder / name)
        except OSError:
            # A process that replaces another must not fail for its log; of its last words this keeps enough.
            return os.memfd_create("shoal-log"), ""

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
