"""`--on local:2`: agents on this machine, as if each had one of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice

from shoal.launch.remote.starting import (
    AgentHandle,
    AgentProcess,
    Candidate,
    Invitation,
    address_towards,
    agent_command,
)
from shoal.spec.world import LOOPBACK


def make(count: str, tell: Callable[[str], None]) -> HereStarter:
    """Of `local:2`."""
    return HereStarter(int(count))


@dataclass
class HereStarter:
    """Agents on this machine, as if each had one of its own: to try what runs on several hosts."""

    count: int
    patience_s: float = 15.0

    def __post_init__(self) -> None:
        self.names: Sequence[str] = [f"host-{number}" for number in range(self.count)]

    def own_address(self, interface: str) -> str:
        return address_towards(LOOPBACK, interface)

    def start(self, invitation: Invitation) -> list[AgentHandle]:
        self.names = self.names[: invitation.cluster.max_hosts]
        self.count = len(self.names)
        return self._run(invitation, self.names)

    def more(self, invitation: Invitation, count: int, there: Collection[str]) -> list[AgentHandle]:
        """Agents of the first names that nobody has."""
        free = (name for name in map("host-{}".format, range(len(there) + count)) if name not in there)
        return self._run(invitation, list(islice(free, count)))

    def _run(self, invitation: Invitation, names: Sequence[str]) -> list[AgentHandle]:
        return [
            AgentProcess.run(name, agent_command(invitation, Candidate(name=name)), invitation.key)
            for name in names
        ]
