"""What processes leave in their host's own copy of the run folder, on its way to the supervisor's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

from shoal.comm.host_words import FileGone, FilePiece, LogPiece
from shoal.launch.remote.pieces import PIECE_BYTES, cut
from shoal.observe.checkpoint_names import MANIFEST
from shoal.observe.happenings import CheckpointWritten, Saved
from shoal.spec.told import Told

_KEPT = ("checkpoints", "best", "images")
"""Folders that belong to the run; all else there is one host's own."""
_MODELS = "*.safetensors"
_LOGS = "logs"

Seen = tuple[int, int, int]


class OutgoingFiles:
    """The files of a run folder that lies on this host alone, and how much of each has been sent."""

    def __init__(self, folder: Path, home: str) -> None:
        """`home`: the run folder on the supervisor's host."""
        self._folder = folder
        self._home = home
        self._sent: dict[str, Seen] = {name: seen for name, _, seen in self._found()}
        self._printed: dict[str, int] = {}

    def changes(self) -> Iterator[FilePiece | FileGone]:
        """What is new since the last call, in pieces. Files are opened at once: their names may go any time."""
        found = {name: (path, seen) for name, path, seen in self._found()}
        pieces: list[Iterator[FilePiece]] = []
        for name, (path, seen) in found.items():
            if self._sent.get(name) != seen:
                with suppress(OSError):  # It has just been removed.
                    pieces.append(cut(path.open("rb"), name))
        gone = [name for name in self._sent if name not in found and not name.startswith(_KEPT[0])]
        self._sent = {name: seen for name, (_, seen) in found.items()}
        return chain(chain.from_iterable(pieces), (FileGone(name=name) for name in gone))

    def begin_again(self) -> None:
        """Nobody knows what has arrived: all of it is sent once more."""
        self._sent, self._printed = {}, {}

    def printed(self) -> Iterator[LogPiece]:
        """What processes have printed since the last call."""
        with suppress(OSError):
            for path in sorted((self._folder / _LOGS).iterdir()):
                name = path.relative_to(self._folder).as_posix()
                with path.open("rb") as file:
                    file.seek(self._printed.get(name, 0))
                    while data := file.read(PIECE_BYTES):
                        offset = self._printed.get(name, 0)
                        yield LogPiece(name=name, offset=offset, data=data)
                        self._printed[name] = offset + len(data)

    def at_home(self, word: Told) -> Told:
        """What a process tells of its files, as it is true at the supervisor's."""
        if isinstance(word, CheckpointWritten | Saved):
            return replace(word, path=self.path_at_home(word.path))
        return word

    def path_at_home(self, path: str) -> str:
        """Where a file of this folder lies there."""
        own = str(self._folder)
        return self._home + path[len(own) :] if path.startswith(own) else path

    def _found(self) -> Iterator[tuple[str, Path, Seen]]:
        """Whole files, the oldest first; what makes a folder a checkpoint behind all else in it."""
        files = list(self._folder.glob(_MODELS))
        for kept in _KEPT:
            for folder, folders, names in os.walk(self._folder / kept):
                folders[:] = [name for name in folders if not name.startswith(".")]
                files += [Path(folder) / name for name in names]
        seen: list[tuple[str, Path, Seen]] = []
        for path in files:
            if not path.name.startswith("."):
                with suppress(OSError):
                    status = path.stat()
                    key = (status.st_mtime_ns, status.st_size, status.st_ino)
                    seen.append((path.relative_to(self._folder).as_posix(), path, key))
        return iter(sorted(seen, key=lambda one: (one[1].name == MANIFEST, one[2][0])))
