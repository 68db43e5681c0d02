"""A folder for Unix sockets that no other user of this machine can enter.

Sockets that lie in no file system can be called by everybody on the host; those in a folder of mode 0700 only by
its owner, whom the kernel knows. So a stranger costs a listener nothing, and cannot take the place of one that
died.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from typing import Self

from shoal.errors import LaunchError

PREFIX = "shoal-sockets-"
_FALLBACK = "/tmp"
_MOST_BASE_BYTES = 56
"""The kernel takes paths of sockets up to 107 bytes; the folder's name and a socket's in it need the rest."""


class SocketFolder:
    """A new folder, removed by `close`; what a process that was killed has left is removed by the next one.

    Its owner holds a lock on it (flock, which ends with the process), so that the living are told from the dead.
    """

    def __init__(self, prefix: str = PREFIX) -> None:
        """`prefix`: of its name; folders for other things that are to be this user's alone have others."""
        base = _base()
        _sweep(base, prefix)
        self.path, self._fd = _make(base, prefix)

    def close(self) -> None:
        """Remove it with all sockets in it."""
        if self._fd != -1:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _base() -> str:
    """The folder for temporary files, unless its name is too long or others could move what lies in it."""
    given = tempfile.gettempdir()
    status = os.stat(given)
    is_safe = status.st_mode & stat.S_ISVTX or not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    is_ours = status.st_uid in (0, os.geteuid())
    return given if is_safe and is_ours and len(os.fsencode(given)) <= _MOST_BASE_BYTES else _FALLBACK


def _make(base: str, prefix: str) -> tuple[str, int]:
    while True:
        try:
            path = tempfile.mkdtemp(prefix=prefix, dir=base)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # Somebody who swept did not yet see that it is in use.
        except OSError as error:
            raise LaunchError(
                f"No folder can be made in {base} ({error.strerror}); make room there, or set TMPDIR."
            ) from None
        if _lock(fd) and os.path.isdir(path):
            return path, fd
        os.close(fd)


def _sweep(base: str, prefix: str) -> None:
    """Remove the folders of this user whose owners are gone."""
    for name in os.listdir(base):
        if not name.startswith(prefix):
            continue
        with suppress(OSError):  # It is another user's, or somebody else removes it.
            path = os.path.join(base, name)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_uid == os.geteuid() and _lock(fd):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
