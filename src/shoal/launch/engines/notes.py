"""The folder in which processes that somebody else started meet, and what they leave there for each other.

It is this user's alone (0700), and so is each note in it (0600): the run's key goes through it, and must not go
through a launcher's arguments, environment or store, which others can read or call.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from shoal.errors import LaunchError, ProtocolError, SpecError
from shoal.launch.engines.found import FoundRank
from shoal.spec.told import Told

MEETING_VARIABLE = "SHOAL_MEETING_FOLDER"
"""A folder that all hosts see, where it is not that of the runs."""
_PREFIX = ".meeting-"
CALL, TICKET = "call", "ticket"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO

Note = TypeVar("Note", bound=Told)


class CheckIn(Told, kind="check-in"):
    """A process that waits."""

    nonce: str
    host: str
    group: str
    cores: list[int]
    """Those that it may use."""
    is_worker: bool
    beat: int
    failure: str = ""
    """Why it could not be its host's agent."""


class HostShare(Told, kind="share"):
    """One of the hosts on which ranks are."""

    name: str
    reached_as: str
    """What a network calls it, perhaps."""
    agent: int
    """The rank that becomes its agent: its first."""
    cores: list[int]
    """What all of its ranks together may use."""
    workers: int


class Call(Told, kind="call"):
    """What the first process says to all others."""

    nonce: str
    beat: int
    members: list[str]
    """The nonces of all others that have come; nobody else is meant."""
    hosts: list[dict[str, Any]]
    """Each a `HostShare`."""
    status: int | None = None
    """With which to end; None while the run goes on."""


class TicketLeft(Told, kind="ticket"):
    """How agents join, until all have."""

    number: str
    address: str
    key: str
    ports: str


class MeetingFolder:
    """The folder, and the notes in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, found: FoundRank, runs: Path) -> MeetingFolder:
        """The one in which the ranks of this world meet."""
        root = Path(os.environ.get(MEETING_VARIABLE) or runs)
        name = blake2b(f"{found.by} {found.identity}".encode(), digest_size=8).hexdigest()
        return cls(root.absolute() / f"{_PREFIX}{name}")

    def write(self, name: str, note: Told) -> None:
        """Leave a note, whole at any moment, that nobody else can read."""
        self._make()
        draft = self.path / f"{name}.{secrets.token_hex(4)}"
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump(note.plain(), file)
            os.replace(draft, self.path / name)
        except FileNotFoundError:
            pass  # Whoever was here before removes the folder just now; the next note makes it anew.
        except OSError as error:
            raise LaunchError(
                f"The processes of this run meet in {self.path}, but nothing can be written there "
                f"({error.strerror}); name a folder that all hosts see with {MEETING_VARIABLE}."
            ) from None

    def read(self, name: str, kind: type[Note]) -> Note | None:
        """A note; None where there is none, or none of this kind."""
        path = self.path / name
        try:
            with open(path, encoding="utf-8") as file:
                status = os.fstat(file.fileno())
                text = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise LaunchError(
                f"The processes of this run meet in {self.path}, but {name} there cannot be read "
                f"({error.strerror}); see that all of them run as one user."
            ) from None
        if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
            raise SpecError(
                f"{path}, through which this run's key goes, must be yours alone (mode 0600), found mode "
                f"{stat.S_IMODE(status.st_mode):04o} and user {status.st_uid}; remove it and begin again."
            )
        try:
            return kind.from_plain(json.loads(text))
        except (ValueError, ProtocolError):
            return None

    def remove(self, name: str) -> None:
        """Take a note away."""
        with suppress(OSError):
            os.unlink(self.path / name)

    def notes(self) -> list[str]:
        """The names of all that are there."""
        try:
            return os.listdir(self.path)
        except OSError:
            return []

    def close(self) -> None:
        """Take all away."""
        for name in self.notes():
            self.remove(name)
        with suppress(OSError):
            self.path.rmdir()

    def _make(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            status = self.path.lstat()
        except OSError as error:
            raise LaunchError(
                f"The processes of this run cannot meet in {self.path} ({error.strerror}); name a folder that all "
                f"hosts see with {MEETING_VARIABLE}."
            ) from None
        is_folder = stat.S_ISDIR(status.st_mode)
        if not is_folder or status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
            raise SpecError(
                f"{self.path}, in which the processes of this run meet, must be a folder of yours alone (mode "
                f"0700), found mode {stat.S_IMODE(status.st_mode):04o} and user {status.st_uid}; remove it, or "
                f"name another folder with {MEETING_VARIABLE}."
            )


def name_of(rank: int) -> str:
    """Where a rank's note lies."""
    return f"rank-{rank}"
