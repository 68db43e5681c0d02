"""`--on ranks:FOLDER`: hosts on which somebody else has started processes, which have met in that folder.

Nobody writes that: it is what `shoal train` finds in its environment. Here the first process has agents come: the
first of each other host, which waits for that, and one more of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import LaunchError
from shoal.launch.engines.by_hand import way_out
from shoal.launch.engines.notes import (
    CALL,
    TICKET,
    Call,
    CheckIn,
    HostShare,
    MeetingFolder,
    TicketLeft,
    name_of,
)
from shoal.launch.remote.starting import (
    AgentHandle,
    AgentProcess,
    Candidate,
    Invitation,
    address_towards,
    agent_command,
)


def make(folder: str, tell: Callable[[str], None]) -> RankStarter:
    """Of `ranks:FOLDER`, in the process that has called the meeting."""
    meeting = MeetingFolder(Path(folder))
    if (call := meeting.read(CALL, Call)) is None or call.status is not None:
        raise LaunchError(
            f"The run was started by processes that have met in {folder}, and are gone; start it with others "
            "again, or say --on local."
        )
    return RankStarter(meeting, [HostShare.from_plain(one) for one in call.hosts])


@dataclass
class RankStarter:
    """Hosts whose first ranks become agents."""

    meeting: MeetingFolder
    shares: Sequence[HostShare]
    patience_s: float = 15.0
    names: Sequence[str] = field(init=False)
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.names = [share.name for share in self.shares]
        self.count = len(self.names)

    def own_address(self, interface: str) -> str:
        """On the way to another host; on the way out where this machine knows none of them by name."""
        for share in self.shares[1:]:
            try:
                return address_towards(share.reached_as, interface)
            except LaunchError:
                continue
        return way_out(interface)

    def start(self, invitation: Invitation) -> list[AgentHandle]:
        own, *others = self.shares
        self.meeting.write(
            TICKET,
            TicketLeft(
                number=secrets.token_hex(8),
                address=invitation.address,
                key=invitation.key.text,
                ports=invitation.ports,
            ),
        )
        command = agent_command(invitation, Candidate(name=own.name, workers=str(own.workers)))
        waiting = [WaitingRank(share.name, share.agent, self.meeting) for share in others]
        here = AgentProcess.run(own.name, command, invitation.key)
        return [here, *waiting, LeftTicket(self.meeting)]


@dataclass
class WaitingRank:
    """The first rank of a host, which becomes its agent by itself, and waits again when it was dismissed."""

    name: str
    """Of its host."""
    rank: int
    meeting: MeetingFolder

    def failure(self) -> str | None:
        note = self.meeting.read(name_of(self.rank), CheckIn)
        return f"Host {self.name} could not join: {note.failure}" if note is not None and note.failure else None

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


@dataclass
class LeftTicket:
    """The note with the run's key, until all have joined."""

    meeting: MeetingFolder
    name: str = "a ticket"

    def failure(self) -> str | None:
        return None

    def close(self) -> None:
        self.meeting.remove(TICKET)

    def abandon(self) -> None:
        self.close()
