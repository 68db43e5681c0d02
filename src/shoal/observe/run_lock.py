"""One supervisor at a time in a run folder, and a word about who it is.

The lock is the kernel's (`flock`): it goes with the process that holds it, however that ends. The file says who.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from shoal.errors import LaunchError
from shoal.observe.disk import writing

FILE_NAME = "lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: set[int] = set()
"""Descriptors of this process's locks: a fork would hold them, too, and might live longer."""


class RunLock:
    """Keeps a run folder for this process, from `with` to its end; `LaunchError` says who has it already.

    `report` is told where the file system has no locks.
    """

    def __init__(self, folder: Path, report: Callable[[str], None]) -> None:
        self._folder = folder
        self._path = folder / FILE_NAME
        self._report = report
        self._fd = -1

    def __enter__(self) -> RunLock:
        with writing(self._folder):
            self._fd = self._take()
            _held.add(self._fd)
            os.ftruncate(self._fd, 0)
            os.write(self._fd, _word().encode())
        return self

    def __exit__(self, *_: object) -> None:
        # Removed while it is held: whoever opened it meanwhile finds that it is no longer the folder's.
        with suppress(OSError):
            self._path.unlink()
        _held.discard(self._fd)
        os.close(self._fd)

    def _take(self) -> int:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(fd, self._path):
                    return fd
            except BlockingIOError:
                told = os.pread(fd, 4096, 0)
                os.close(fd)
                raise self._refusal(told) from None
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    os.close(fd)
                    raise
                self._report(
                    f"the disk of {self._folder} has no locks ({error.strerror}), so nothing keeps others out"
                )
                return fd
            os.close(fd)

    def _refusal(self, told: bytes) -> LaunchError:
        try:
            holder = json.loads(told)
            who = f"{holder['command']!r}, process {holder['pid']} on {holder['host']} since {holder['since']}"
        except (ValueError, KeyError, TypeError):
            who = "a process that has just begun"
        return LaunchError(
            f"Run {self._folder.name!r} is going on in {self._folder}: {who}; wait for its end or stop it, or "
            "train under another name."
        )


def _word() -> str:
    return json.dumps(
        {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            "command": shlex.join([Path(sys.argv[0] or "python").name, *sys.argv[1:]])[:1000],
        }
    )


def _is_at(fd: int, path: Path) -> bool:
    """Whether the file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _let_go() -> None:
    for fd in _held:
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
