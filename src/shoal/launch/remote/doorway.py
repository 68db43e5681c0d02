"""The door of a run that goes on: hosts that were cut off come back through it, and others come later."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from shoal.comm.tcp.stream_channel import ChannelDoor
from shoal.launch.remote.callers import Arrival, Callers, other_versions
from shoal.launch.remote.remote_host import RemoteHost
from shoal.launch.remote.starting import AgentHandle


class Doorway:
    """Lets hosts in while a run goes on, as long as whoever supervises it looks here."""

    def __init__(
        self,
        door: ChannelDoor,
        hosts: Sequence[RemoteHost],
        away: list[AgentHandle],
        welcome: Callable[[RemoteHost], bool],
        invite: Callable[[int, Collection[str]], list[AgentHandle]],
        most: int | None = None,
    ) -> None:
        """`away`: agents of hosts that nothing is heard of, which may come back. `welcome` says
        whether a host can take part. `invite` has so many more come, besides those of these names; `most` hosts
        there may be at a time."""
        self._door = door
        self._callers = Callers(door)
        self._hosts = list(hosts)
        self._away = away
        self._welcome = welcome
        self._invite = invite
        self._most = most
        self._announced: list[Arrival] = []

    def fileno(self) -> int:
        """Readable when somebody calls; what it says comes a little later."""
        return self._door.fileno()

    def collect(self) -> list[RemoteHost]:
        """The hosts that have come, a call later: who had their names before is known to be lost by then. Never
        waits."""
        arrived, self._announced = self._announced, self._callers.take()
        for one in self._announced:
            for before in self._hosts:
                if before.facts.name == one.facts.name:
                    before.cut_off()
        return [host for one in arrived if (host := self._admitted(one)) is not None]

    def invite(self, count: int) -> None:
        """Have so many more come."""
        for agent in [one for one in self._away if one.failure() is not None]:  # It may be tried once more.
            self._away.remove(agent)
            agent.abandon()
        there = {host.facts.name for host in self._hosts if host.is_there} | {agent.name for agent in self._away}
        self._away += self._invite(count, there)

    def close(self) -> None:
        """Let nobody in any more, and end the agents that have not come back."""
        self._callers.close()
        for one in self._announced:
            one.channel.close()
        self._door.close()
        while self._away:
            self._away.pop().abandon()

    def _admitted(self, one: Arrival) -> RemoteHost | None:
        agent = next((agent for agent in self._away if agent.name == one.facts.name), None)
        host = RemoteHost(one.channel, one.facts, agent=agent, away=self._away, door=one.door)
        if (reason := self._objection(one)) is not None:
            host.refuse(reason)
            host.close()
            return None
        if agent is not None:
            self._away.remove(agent)
        if not self._welcome(host):
            host.close()
            return None
        self._hosts.append(host)
        return host

    def _objection(self, one: Arrival) -> str | None:
        """Why a host cannot take part."""
        there = sum(host.is_there for host in self._hosts)
        if self._most is not None and there >= self._most:
            return f"The run has {there} hosts already, which is the most that its --hosts allows."
        return other_versions(one.facts.name, one.versions)
