"""How the processes that somebody else started become one run: they meet in a folder that all hosts see.

Each leaves a note of itself and writes it again while it waits, so that notes of processes that are gone are not
taken for living ones. The first sees all of them, decides who is whose host's agent, and says at its end with
which status all others are to end.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Event, Thread

from shoal.errors import CommError, LaunchError, SpecError
from shoal.launch.engines.found import FoundRank
from shoal.launch.engines.notes import (
    CALL,
    MEETING_VARIABLE,
    TICKET,
    Call,
    CheckIn,
    HostShare,
    MeetingFolder,
    TicketLeft,
    name_of,
)

_LOOK_EVERY_S = 0.1
_MOST_RANKS_A_SECOND = 200
"""What a file server should have to bear."""
_BEAT_S = 1.0
_SILENCE_S = 30.0
"""A first process of which nothing was heard for so long is gone."""
_TELL_AFTER_S = 2.0
_LEAVE_S = 5.0
_HURRY_S = 30.0
"""A run has begun by then; who waits for its end need not look so often."""
_LONG_PAUSE_S = 0.5


def _note_of(found: FoundRank, cores: list[int]) -> CheckIn:
    return CheckIn(
        nonce=secrets.token_hex(8),
        host=found.host,
        group=found.group,
        cores=cores,
        is_worker=found.is_worker,
        beat=0,
    )


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

    def gather(self, tell: Callable[[str], None] = lambda text: None) -> None:
        """Wait for all the others; `tell` takes a line when it takes long. LaunchError when they do not come."""
        found, seen = self._found, dict[int, Liveness]()
        began_at = arrived_at = time.monotonic()
        is_told = False
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
            if not is_told and time.monotonic() - began_at > _TELL_AFTER_S:
                is_told = True
                tell(
                    f"found: the first of {found.size} processes by {found.by}; waiting for the others in "
                    f"{self.folder.path} (--on local trains here alone)"
                )
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
        self._began_at = time.monotonic()
        self._first = Liveness(changed_at=self._began_at)
        self._used = ""
        """The ticket that this process has joined with."""

    def follow(self, serve: Callable[[HostShare, TicketLeft], None]) -> int:
        """Wait for the end of the run; its status. `serve` joins it as the agent of this process's host."""
        try:
            while (status := self._look(serve)) is None:
                in_hurry = time.monotonic() - self._began_at < _HURRY_S
                time.sleep(max(0.0 if in_hurry else _LONG_PAUSE_S, _pause(self._found.size)))
            return status
        finally:
            self._leave()

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

    def _leave(self) -> None:
        """The last one takes the folder away."""
        if self._found.rank is not None:
            self._folder.remove(name_of(self._found.rank))
        with suppress(OSError):
            self._folder.path.rmdir()

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
            for name in (CALL, TICKET):  # Who has left them is gone; one who comes now writes them again.
                self._folder.remove(name)
            raise LaunchError(
                f"The first of {self._found.size} processes by {self._found.by} was not heard in "
                f"{self._folder.path} for {silent_s:.0f} s; run this command in all of them, in a folder that all "
                f"hosts see or with {MEETING_VARIABLE}, or train here alone with --on local."
            )


def _twice(found: FoundRank, rank: int) -> str:
    return (
        f"Two processes say that they are rank {rank} of {found.size} by {found.by}; give each a number of its "
        f"own, or, where they are of two runs, each run a {MEETING_VARIABLE} of its own."
    )
