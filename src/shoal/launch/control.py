"""A way to talk to a run that is going on: one question per connection, one answer.

The supervisor listens at a Unix socket whose random name has no place in any file system, so that it is gone when
the supervisor is, and no path can be too long for it. The run folder's file `control` (0600) holds the name.
"""

from __future__ import annotations

import os
import re
import secrets
import selectors
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.comm.channel import Channel
from shoal.comm.words import ScaleAnswered, ScaleWanted, understood
from shoal.errors import CommError, CommTimeout, LaunchError, PeerLost, SpecError
from shoal.launch.messages import ScaleRequest
from shoal.launch.requests import not_running
from shoal.observe.disk import writing
from shoal.spec.told import by_kind, read_message

FILE_NAME = "control"
HOSTS = re.compile(r"[+-]?[1-9]\d{0,3}")
"""So many hosts, or so many more or fewer."""
_BACKLOG = 8


class ControlSocket:
    """The supervisor's end. Whoever connects as another user is turned away."""

    def __init__(self, run_dir: Path | str) -> None:
        name = f"shoal-control-{os.getpid()}-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._selector = selectors.EpollSelector()
        self._channels: dict[int, Channel] = {}
        """By the number of the request that comes or came through it."""
        self._asked = 0
        self._file = Path(run_dir) / FILE_NAME
        try:
            self._listener.bind(f"\0{name}")
            self._listener.listen(_BACKLOG)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)
            _write_private(self._file, name)
        except BaseException:
            self._listener.close()
            self._selector.close()
            raise

    def fileno(self) -> int:
        """Readable, for a selector, when `collect` has something to tell."""
        return self._selector.fileno()

    def collect(self) -> list[ScaleRequest]:
        """What has been asked since the last call. Never waits."""
        requests = []
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept()
            elif (request := self._read(key.data)) is not None:
                requests.append(request)
        return requests

    def reply(self, number: int, answer: ScaleAnswered) -> None:
        """Answer a request, and hang up."""
        channel = self._channels.pop(number)
        with suppress(PeerLost):  # It did not wait for the answer.
            channel.send(answer.as_message())
        channel.close()

    def close(self) -> None:
        """Turn away whoever still waits, and leave nothing behind."""
        self._file.unlink(missing_ok=True)
        self._selector.close()
        self._listener.close()
        for channel in self._channels.values():
            channel.close()

    def _accept(self) -> None:
        with suppress(BlockingIOError, ConnectionError):
            sock, _ = self._listener.accept()
            channel = Channel(sock, "whoever controls this run")
            if channel.peer_uid() != os.getuid():
                channel.close()
                return
            self._asked += 1
            self._channels[self._asked] = channel
            self._selector.register(channel, selectors.EVENT_READ, self._asked)

    def _read(self, number: int) -> ScaleRequest | None:
        channel = self._channels[number]
        try:
            message = channel.poll()
        except CommError:
            message = {}
        if message is None:
            return None
        # One question per connection: whatever this is, nothing more is read from there.
        self._selector.unregister(channel)
        wish = understood(message, by_kind(ScaleWanted))
        if isinstance(wish, ScaleWanted) and is_sensible(wish):
            return ScaleRequest(number=number, **wish.plain())
        text = "This is not a request that a run understands; it takes whole numbers of at least 1."
        self.reply(number, ScaleAnswered(text=text, is_refused=True))
        return None


def is_sensible(wish: ScaleWanted) -> bool:
    """Whether its numbers can be meant."""
    are_counts = all(one is None or one >= 1 for one in (wish.workers, wish.servers))
    is_alone = wish.hosts is None or (wish.workers is None and wish.servers is None)
    return are_counts and is_alone and (wish.hosts is None or HOSTS.fullmatch(wish.hosts) is not None)


def request_scale(
    run_dir: Path,
    *,
    workers: int | None = None,
    servers: int | None = None,
    hosts: str | None = None,
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """Ask a running job for so many workers, servers or hosts, or how many it has; its answer, with a `text`."""
    channel = _connect(run_dir)
    try:
        channel.send(ScaleWanted(workers=workers, servers=servers, hosts=hosts).as_message())
        answer = channel.receive(timeout_s)
    except PeerLost:
        raise not_running(f"Run {run_dir.name!r}") from None
    finally:
        channel.close()
    if answer is None:
        raise CommTimeout(f"Run {run_dir.name!r} has not answered within {timeout_s:.0f} s; look at what it says.")
    return accepted(read_message(answer, by_kind(ScaleAnswered)))


def accepted(answer: ScaleAnswered) -> dict[str, Any]:
    """What a run has answered, as plain data: a `text`, and numbers; `LaunchError` where it has refused."""
    if answer.is_refused:
        raise LaunchError(answer.text)
    return {name: value for name, value in answer.plain().items() if name != "is_refused"}


def _connect(run_dir: Path) -> Channel:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        name = (run_dir / FILE_NAME).read_text(encoding="ascii")
        sock.connect(f"\0{name}")
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        raise not_running(f"Run {run_dir.name!r}") from None
    except PermissionError:
        sock.close()
        raise SpecError(f"Run {run_dir.name!r} belongs to another user, who alone can change it.") from None
    channel = Channel(sock, "the run")
    if channel.peer_uid() != os.getuid():
        channel.close()
        raise SpecError(f"Run {run_dir.name!r} belongs to another user, who alone can change it.")
    return channel


def _write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read; a reader finds all of it or none."""
    part = path.with_name(f".{path.name}.part")
    with writing(path.parent):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise LaunchError(f"Run folder {path.parent} is a file; choose another run folder.") from None
        part.unlink(missing_ok=True)
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(text)
        part.replace(path)
