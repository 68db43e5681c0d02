"""An engine for hosts that a network reaches: has an agent started on each, and waits until all are there."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace

from shoal.comm.security import RunKey
from shoal.comm.tcp.addresses import listening_at
from shoal.comm.tcp.stream_channel import ChannelDoor
from shoal.errors import Interrupted, LaunchError
from shoal.launch.remote.callers import Arrival, Callers, other_versions
from shoal.launch.remote.doorway import Doorway
from shoal.launch.remote.luggage import equip
from shoal.launch.remote.printing import WholeLines
from shoal.launch.remote.remote_host import LEASE_S, RemoteHost
from shoal.launch.remote.starting import AgentHandle, GrowingStarter, Invitation, KnownMeeting, Starter
from shoal.launch.worlds import threads_on
from shoal.spec import Job

_LOOK_EVERY_S = 0.1
_SETTLE_S = 2.0
"""How long to wait for others, once as many are there as a run needs."""


class AgentEngine:
    """Has agents started, each of which starts processes on its host.

    `wants_end`: whether the user has asked for the end, who need not wait until all hosts are there; `tell` takes
    a line for the user; `show` what scripts print.
    """

    def __init__(
        self,
        starter: Starter,
        *,
        tell: Callable[[str], None] = lambda text: None,
        wants_end: Callable[[], bool] = lambda: False,
        show: Callable[[bytes], None] | None = None,
        lease_s: float = LEASE_S,
    ) -> None:
        self._starter = starter
        self._tell = tell
        self._wants_end = wants_end
        self._show = show
        self._lease_s = lease_s
        self._has_begun = False
        self.key: RunKey | None = None
        """That of the hosts that were reserved last."""

    def reserve(self, job: Job) -> list[RemoteHost]:
        """All hosts, in the order in which the user named them; for another attempt, those that are left."""
        cluster, starter = job.cluster, self._starter
        key, ports = RunKey.create(), cluster.ports
        if isinstance(starter, KnownMeeting):
            key, ports = starter.key, starter.ports
        self.key = key
        away: list[AgentHandle] = []
        with ExitStack() as at_failure:
            door = ChannelDoor(listening_at(starter.own_address(cluster.interface), ports), key, encrypt=True)
            at_failure.callback(door.close)
            invitation = Invitation(
                address=door.address, key=key, ports=cluster.ports, cluster=cluster, wants_end=self._wants_end
            )
            agents = starter.start(invitation)
            for agent in agents:
                at_failure.callback(agent.abandon)
            least = 1 if self._has_begun else cluster.min_hosts or starter.count
            gathering = Gathering(
                starter, door, agents, lease_s=self._lease_s, away=away, least=least, most=cluster.max_hosts
            )
            at_failure.callback(gathering.close)
            hosts = gathering.wait(self._wants_end)
            if (show := self._show) is not None:
                for host in hosts:
                    host.show = WholeLines(show)
            for text in gathering.abandon_absent():
                self._tell(f"{text} The run goes on without it.")
            equipped = equip(hosts, job, self._tell, least=least)
            threads = threads_on(job, [one.host.facts for one in equipped])
            job = replace(job, cluster=replace(cluster, threads=threads))
            for one in equipped:
                one.host.welcome(job, one.moved)
            at_failure.pop_all()
        useful = [one.host for one in equipped]
        for host in hosts:
            if host not in useful:
                host.close()
        self._doorway = Doorway(
            door,
            useful,
            away,
            lambda host: self._let_in(host, job),
            lambda count, there: self._invite(invitation, count, there),
            cluster.max_hosts,
        )
        self._has_begun = True
        return useful

    def _let_in(self, host: RemoteHost, job: Job) -> bool:
        """Have a host take part that comes later; whether it can."""
        for one in equip([host], job, self._tell, least=0):
            one.host.welcome(job, one.moved)
            return True
        return False

    def _invite(self, invitation: Invitation, count: int, there: Collection[str]) -> list[AgentHandle]:
        if not isinstance(self._starter, GrowingStarter):
            raise LaunchError(
                "The engine of this run gives no more hosts while it goes on (local, ssh, hosts, join, mpi, "
                "slurm, ray do); stop it after a checkpoint, and go on with --resume on more."
            )
        return self._starter.more(invitation, count, there)

    def newcomers(self) -> Doorway:
        """Hosts that come to the run for which hosts were reserved last."""
        return self._doorway


class Gathering:
    """Hosts as they come, until all are there."""

    def __init__(
        self,
        starter: Starter,
        door: ChannelDoor,
        agents: Sequence[AgentHandle],
        *,
        lease_s: float,
        away: list[AgentHandle],
        least: int,
        most: int | None = None,
    ) -> None:
        """`least`: how many must come. With `most` those that come later than so many are waited for no longer
        than a moment, and take part when they are there: their agents are left in `away`."""
        self._starter = starter
        self._least = least
        self._most = most
        self._lease_s = lease_s
        self._door = door
        self._away = away
        self._agents = {agent.name: agent for agent in agents}
        self._callers = Callers(door)
        self._hosts: dict[str, RemoteHost] = {}
        self._absent: dict[str, str] = {}
        """By name: why a host cannot come."""

    def wait(self, wants_end: Callable[[], bool]) -> list[RemoteHost]:
        """All of them, or enough. LaunchError as soon as too many cannot come, or when time is over."""
        deadline = time.monotonic() + self._starter.patience_s
        begin_at = deadline
        count = self._starter.count
        with selectors.DefaultSelector() as selector:
            selector.register(self._door, selectors.EVENT_READ)
            while len(self._hosts) + len(self._absent) < count and time.monotonic() < begin_at:
                # A caller that says something wakes nobody, but not for long.
                selector.select(_LOOK_EVERY_S)
                self._look()
                if wants_end():
                    raise Interrupted("The run was stopped on request, before its hosts were there.")
                if self._most is not None and len(self._hosts) >= self._least:
                    begin_at = min(begin_at, time.monotonic() + _SETTLE_S)
                if self._absent and count - len(self._absent) < self._least:
                    raise LaunchError(next(iter(self._absent.values())))
        if len(self._hosts) < self._least:
            raise LaunchError(self._who_is_missing())
        if self._most is None:
            self._absent |= dict.fromkeys(self._missing(), self._who_is_missing())
        order = self._starter.names or list(self._hosts)
        return [self._hosts[name] for name in order if name in self._hosts]

    def abandon_absent(self) -> list[str]:
        """From here on each host closes its own agent. What no host came of is ended, unless it may come later;
        why none did."""
        for name, agent in self._agents.items():
            if name in self._hosts:
                continue
            if self._most is None or name in self._absent:
                agent.abandon()
            else:
                self._away.append(agent)
        return list(self._absent.values())

    def close(self) -> None:
        """Send all away that have come."""
        for host in self._hosts.values():
            host.close()
        self._callers.close()

    def _look(self) -> None:
        for one in self._callers.take():
            self._take_in(one)
        for name, host in list(self._hosts.items()):
            try:
                host.collect()  # Its beats are answered.
            except LaunchError as error:  # It has come and gone.
                self._absent[name] = str(error)
                self._hosts.pop(name).close()
        for name, agent in self._agents.items():
            if name not in self._hosts and (failure := agent.failure()) is not None:
                self._absent.setdefault(name, failure)

    def _take_in(self, one: Arrival) -> None:
        agent = self._agents.get(one.facts.name)
        host = RemoteHost(
            one.channel, one.facts, agent=agent, lease_s=self._lease_s, away=self._away, door=one.door
        )
        if (reason := self._objection(one.facts.name, one.versions)) is not None:
            host.refuse(reason)
            host.close()
            raise LaunchError(reason)
        self._hosts[one.facts.name] = host

    def _objection(self, name: str, versions: dict[str, str]) -> str | None:
        """Why a host cannot take part."""
        if name in self._hosts or (self._starter.names and name not in self._starter.names):
            return f"A host called {name} has joined, but no other of that name was expected; name each once."
        return other_versions(name, versions)

    def _missing(self) -> list[str]:
        """The names of those that have not come; others stand for them where nobody knows their names."""
        if self._starter.names:
            return [name for name in self._starter.names if name not in self._hosts and name not in self._absent]
        return [f"host {number}" for number in range(self._starter.count - len(self._hosts))]

    def _who_is_missing(self) -> str:
        missing = self._missing() if self._starter.names else []
        who = ", ".join(missing) or f"{self._starter.count - len(self._hosts)} of {self._starter.count} hosts"
        return (
            f"{who} did not join within {self._starter.patience_s:.0f} s; see whether {self._door.address} can be "
            "reached from there, or name another network with --interface."
        )
