"""What callbacks have logged and nobody was told of yet: in a file, where it outlives who has logged it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgpack

from shoal.errors import ProtocolError
from shoal.observe.happenings import Happening, ImageLogged, ScalarsLogged, TextLogged
from shoal.spec.told import Told, by_kind, read_message

_KINDS = by_kind(ScalarsLogged, TextLogged, ImageLogged)
_pack = msgpack.Packer().pack


class Unsent:
    """Callbacks are not called again for what a killed worker has told them: what they said then would be lost.

    The file is there while somebody writes into it. What the disk refuses is told all the same, by who lives.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def keep(self, told: Told) -> None:
        """This will be sent soon."""
        with suppress(OSError):
            os.write(self._open(), _pack(told.as_message()))

    def clear(self) -> None:
        """All of it was sent."""
        with suppress(OSError):
            os.ftruncate(self._open(), 0)

    def take(self) -> list[Happening]:
        """What whoever wrote before has left, which is the caller's to send from now on."""
        found: list[Happening] = []
        with suppress(OSError):
            fd = self._open()
            messages = msgpack.Unpacker(max_buffer_size=0)
            messages.feed(os.pread(fd, os.fstat(fd).st_size, 0))
            with suppress(TypeError, ValueError, ProtocolError):  # the last may be torn
                found += (read_message(message, _KINDS) for message in messages)
        self.clear()
        return found

    def remove(self) -> None:
        """Nothing more will be logged."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _open(self) -> int:
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        return self._fd
