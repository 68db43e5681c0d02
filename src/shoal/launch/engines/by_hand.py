"""`--on join:2`: hosts on which somebody starts an agent by hand, with a ticket."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import LaunchError
from shoal.launch.remote.starting import AgentHandle, Invitation, address_towards
from shoal.observe.wording import plural
from shoal.spec.world import LOOPBACK

_ELSEWHERE = "192.0.2.1"
"""An address that nobody has: the way there is the way out of this machine."""


def make(count: str, tell: Callable[[str], None]) -> HandStarter:
    """Of `join:2`."""
    return HandStarter(int(count), tell)


@dataclass
class HandStarter:
    """Hosts on which somebody starts an agent by hand, with the ticket that this leaves in a file."""

    count: int
    tell: Callable[[str], None]
    patience_s: float = 3600.0
    names: Sequence[str] = ()

    def own_address(self, interface: str) -> str:
        return way_out(interface)

    def start(self, invitation: Invitation) -> list[AgentHandle]:
        self.count = min(self.count, invitation.cluster.max_hosts or self.count)
        return self._leave_ticket(invitation, self.count)

    def more(self, invitation: Invitation, count: int, there: Collection[str]) -> list[AgentHandle]:
        """The same again; nobody waits for those that do not come."""
        return self._leave_ticket(invitation, count)

    def _leave_ticket(self, invitation: Invitation, count: int) -> list[AgentHandle]:
        ticket = Ticket()
        invitation.key.save(ticket.path)
        ports = f" --ports {invitation.ports}" if invitation.ports else ""
        command = f"shoal host --join {invitation.address} --ticket {ticket.path}{ports}"
        self.tell(
            f"waiting for {plural(count, 'host')}; run there: {command} (with a copy of this file, which is "
            "a key: keep it to yourself)"
        )
        return [ticket]


def way_out(interface: str) -> str:
    """This machine's address for hosts of which nobody knows where they are."""
    try:
        return address_towards(_ELSEWHERE, interface)
    except LaunchError:
        return LOOPBACK  # It has no network at all.


class Ticket:
    """The run's key in a file that only this user can read, until all have joined."""

    name = "a ticket"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-ticket-")
        self.path = Path(self._folder.name) / "ticket"

    def failure(self) -> str | None:
        return None

    def close(self) -> None:
        self._folder.cleanup()

    def abandon(self) -> None:
        self.close()
