"""How the processes that somebody else started become one run: they meet in a folder that all hosts see.

The folder is this user's alone (0700), and so is each file in it (0600): the run's key goes through it, and must
not go through a launcher's arguments, environment or store, which others can read or call. Each process leaves a
note of itself and writes it again while it waits, so that notes of processes that are gone are not taken for
living ones. The first sees all of them, decides who is whose host's agent, and says at its end with which status
all others are to end.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

from shoal.errors import CommError, LaunchError, ProtocolError, SpecError
from shoal.launch.engines.found import FoundRank
from shoal.spec.told import Told

MEETING_VARIABLE = "SHOAL_MEETING_FOLDER"
"""A folder that all hosts see, where it is not that of the runs."""
_PREFIX = ".meeting-"
CALL, TICKET = "call", "ticket"
_LOOK_EVERY_S = 0.1
_MOST_RANKS_A_SECOND = 200
"""What a file server should have to bear."""
_BEAT_S = 1.0
_SILENCE_S = 30.0
"""A first process of which nothing was heard for so long is gone."""
_LEAVE_S = 5.0
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


def _note_of(found: FoundRank, cores: list[int]) -> CheckIn:
    return CheckIn(
        nonce=secrets.token_hex(8),
        host=found.host,
        group=found.group,
        cores=cores,
        is_worker=found.is_worker,
        beat=0,
    )


def name_of(rank: int) -> str:
    """Where a rank's note lies."""
    return f"rank-{rank}"


def _pause(size: int) -> float:
    return max(_LOOK_EVERY_S, size / _MOST_RANKS_A_SECOND)


@dataclass
class Liveness:
    """Whether what was read of another changes: a note that does not is of one that is gone."""

    beat: tuple[str, int] | None = None
    num_changes: int = 0
    changed_at: float = 0.0

    def see(self, nonce: str, beat: int) -> bool:
        """Whether it lives, as far as one can tell."""
        if (nonce, beat) != self.beat:
            self.num_changes = self.num_changes + 1 if self.beat and self.beat[0] == nonce else 1
            self.beat, self.changed_at = (nonce, beat), time.monotonic()
        return self.num_changes > 1


class Leader:
    """The first process: gathers the others, and tells them the end."""

    def __init__(self, found: FoundRank, folder: MeetingFolder, cores: list[int]) -> None:
        self._found = found
        self.folder = folder
        own = _note_of(found, cores)
        self._members: dict[int, CheckIn] = {0: own}
        self._call = Call(nonce=own.nonce, beat=0, members=[], hosts=[])
        self.hosts: list[HostShare] = []
        """By their first ranks; this one's is the first."""
        self._is_over = Event()
        self._thread = Thread(target=self._beat, name="shoal-meeting", daemon=True)

    def gather(self) -> None:
        """Wait until all are there. LaunchError where they do not come."""
        found, seen = self._found, dict[int, Liveness]()
        arrived_at = time.monotonic()
        while len(self._members) < found.size:
            self._say(self._call)
            for rank in range(1, found.size):
                if rank in self._members or (note := self.folder.read(name_of(rank), CheckIn)) is None:
                    continue
                if seen.setdefault(rank, Liveness()).see(note.nonce, note.beat):
                    self._members[rank] = note
                    arrived_at = time.monotonic()
            if time.monotonic() - arrived_at > found.patience_s:
                raise LaunchError(self._who_is_missing())
            time.sleep(_pause(found.size))
        self.hosts = self._shares()
        self._say(replace(self._call, members=self._nonces, hosts=[one.plain() for one in self.hosts]))
        self._thread.start()

    def end(self, status: int) -> None:
        """Tell all others to end with this status, and wait a moment until they have."""
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        deadline = time.monotonic() + _LEAVE_S
        others = {name_of(rank) for rank in self._members}
        with suppress(LaunchError, SpecError):
            while True:
                self._say(replace(self._call, members=self._nonces, status=status))
                if not others & set(self.folder.notes()) or time.monotonic() > deadline:
                    break
                time.sleep(_LOOK_EVERY_S)
        self.folder.close()

    @property
    def _nonces(self) -> list[str]:
        return [one.nonce for one in self._members.values()]

    def _beat(self) -> None:
        while not self._is_over.wait(_BEAT_S):
            with suppress(LaunchError, SpecError):
                self._say(self._call)

    def _say(self, call: Call) -> None:
        before = self.folder.read(CALL, Call)
        if self._call.beat > 1 and before is not None and before.nonce != self._call.nonce:
            raise LaunchError(_twice(self._found, 0))
        self._call = replace(call, beat=call.beat + 1)
        self.folder.write(CALL, self._call)

    def _shares(self) -> list[HostShare]:
        groups = {
            one.host: {other.group for other in self._members.values() if other.host == one.host}
            for one in self._members.values()
        }
        shares: dict[tuple[str, str], HostShare] = {}
        for rank, one in sorted(self._members.items()):
            name = one.host if len(groups[one.host]) == 1 else f"{one.host}-{one.group}"
            new = HostShare(name=name, reached_as=one.host, agent=rank, cores=[], workers=0)
            so_far = shares.get((one.host, one.group), new)
            shares[one.host, one.group] = replace(
                so_far,
                cores=sorted({*so_far.cores, *one.cores}),
                workers=so_far.workers + one.is_worker,
            )
        return list(shares.values())

    def _who_is_missing(self) -> str:
        missing = [rank for rank in range(self._found.size) if rank not in self._members]
        return (
            f"{len(missing)} of {self._found.size} processes by {self._found.by} (rank "
            f"{', '.join(map(str, missing[:5]))}{', …' if len(missing) > 5 else ''}) did not come to "
            f"{self.folder.path} within {self._found.patience_s:.0f} s; run this command in all of them, in a "
            f"folder that all hosts see or with {MEETING_VARIABLE}, or train here alone with --on local."
        )


class Follower:
    """Any other process: waits, as its host's agent where it is the first there, and ends with the run."""

    def __init__(self, found: FoundRank, folder: MeetingFolder, cores: list[int]) -> None:
        self._found = found
        self._folder = folder
        self._note = _note_of(found, cores)
        self._first = Liveness(changed_at=time.monotonic())
        self._used = ""
        """The ticket that this process has joined with."""

    def follow(self, serve: Callable[[HostShare, TicketLeft], None]) -> int:
        """Wait for the end of the run; its status. `serve` joins it as the agent of this process's host."""
        try:
            while (status := self._look(serve)) is None:
                time.sleep(_pause(self._found.size))
            return status
        finally:
            if self._found.rank is not None:
                self._folder.remove(name_of(self._found.rank))

    def _look(self, serve: Callable[[HostShare, TicketLeft], None]) -> int | None:
        # Writing before reading: what a network's disk has remembered of the folder is then looked up anew.
        self._check_in()
        call = self._folder.read(CALL, Call)
        lives = call is not None and self._first.see(call.nonce, call.beat)
        if call is None or not lives or not self._is_meant(call):
            # While the first process lives, it is the one that loses patience.
            self._check_patience(_SILENCE_S if lives else self._found.patience_s)
            return None
        if call.status is not None:
            return call.status
        self._check_patience(_SILENCE_S)
        shares = [HostShare.from_plain(one) for one in call.hosts]
        for share in (one for one in shares if one.agent == self._found.rank):
            ticket = self._folder.read(TICKET, TicketLeft)
            if ticket is not None and ticket.number != self._used:
                self._used = ticket.number
                self._serve(serve, share, ticket)
        return None

    def _serve(self, serve: Callable[[HostShare, TicketLeft], None], share: HostShare, ticket: TicketLeft) -> None:
        try:
            serve(share, ticket)
        except (LaunchError, CommError) as error:
            self._note = replace(self._note, failure=str(error))  # The first one tells it, where it matters.
        self._first.changed_at = time.monotonic()

    def _is_meant(self, call: Call) -> bool:
        return self._note.nonce in call.members or (self._found.rank is None and bool(call.members))

    def _check_in(self) -> None:
        if (rank := self._found.rank) is None:
            return
        before = self._folder.read(name_of(rank), CheckIn)
        if self._note.beat > 1 and before is not None and before.nonce != self._note.nonce:
            raise LaunchError(_twice(self._found, rank))
        self._note = replace(self._note, beat=self._note.beat + 1)
        self._folder.write(name_of(rank), self._note)

    def _check_patience(self, patience_s: float) -> None:
        """The first process must be heard."""
        if (silent_s := time.monotonic() - self._first.changed_at) > patience_s:
            raise LaunchError(
                f"The first of {self._found.size} processes by {self._found.by} was not heard in "
                f"{self._folder.path} for {silent_s:.0f} s; run this command in all of them, in a folder that all "
                f"hosts see or with {MEETING_VARIABLE}, or train here alone with --on local."
            )


def _twice(found: FoundRank, rank: int) -> str:
    return (
        f"Two processes say that they are rank {rank} of {found.size} by {found.by}; give each a number of its "
        "own, or train alone with --on local."
    )
