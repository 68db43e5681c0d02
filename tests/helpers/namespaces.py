"""Network namespaces as hosts of a run: its agents run inside them, its supervisor outside, at the switch.

For a supervisor inside one, too: `host.command(["shoal", "train", …, "--on", on])` with what
`network.reached_by_command(folder)` gives.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

from benchmarks import namespaces
from benchmarks.namespaces import NamespaceHost, Network
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess, start_zygote
from shoal.launch.remote.gathering import AgentEngine
from shoal.launch.remote.starting import (
    AgentHandle,
    AgentProcess,
    Candidate,
    Invitation,
    address_towards,
    agent_command,
)
from shoal.launch.supervisor import Supervisor
from shoal.observe import Event
from shoal.spec import Cluster, Job

_why_not = cache(namespaces.why_not)
_NEW_NETWORK = 0x40000000
"""What the kernel calls CLONE_NEWNET."""
T = TypeVar("T")


@contextmanager
def network_of(count: int, *, ipv6: bool = False) -> Iterator[Network]:
    """So many hosts, for a fixture or a test; skips it where they cannot be made."""
    if (reason := _why_not()) is not None:
        pytest.skip(reason)
    with Network(count, ipv6=ipv6) as network:
        yield network


def inside(host: NamespaceHost, act: Callable[[], T]) -> T:
    """Do something in a thread that has the network of a host; so have sockets and processes that come of it."""

    def enter() -> T:
        with open(f"/run/netns/{host.name}", "rb") as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return act()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(enter).result()


@contextmanager
def zygotes_in(network: Network) -> Iterator[dict[str, ZygoteProcess]]:
    """A zygote in each host, by its name: so that not every run has to load torch there."""
    with ExitStack() as at_end:
        yield {host.name: at_end.enter_context(inside(host, start_zygote)) for host in network.hosts}


@dataclass
class NamespaceStarter:
    """Agents in the hosts of a network, which are called `host-0` and so on, as `local:2` calls them."""

    network: Network
    patience_s: float = 60.0
    zygotes: Mapping[str, ZygoteProcess] = field(default_factory=dict)
    """By the host's name; where there is none, an agent starts its own."""
    agents: dict[str, AgentProcess] = field(init=False, default_factory=dict)
    """Those that were started last, by name."""
    door: str = ""
    """Where the supervisor listens for them."""
    secrets: list[str] = field(default_factory=list)
    """The keys of the run: that of its hosts, and that of its processes once it is over."""

    _invitation: Invitation | None = field(init=False, default=None)
    _revived: list[AgentProcess] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.count = len(self.network.hosts)
        self.names: Sequence[str] = [f"host-{number}" for number in range(self.count)]

    def own_address(self, interface: str) -> str:
        return address_towards(self.network.hosts[0].address, interface)

    def start(self, invitation: Invitation) -> list[AgentHandle]:
        self._invitation = invitation
        self.door, self.secrets = invitation.address, [invitation.key.text]
        self.agents = {name: self._start_agent(name, invitation) for name in self.names}
        return list(self.agents.values())

    def _start_agent(self, name: str, invitation: Invitation, *, is_new: bool = True) -> AgentProcess:
        host, words = self.host(name), agent_command(invitation, Candidate(name=name))
        if is_new and host.name in self.zygotes:
            words = ["env", f"{ZYGOTE_VARIABLE}={self.zygotes[host.name].name}", *words]
        return AgentProcess.run(name, host.command(words), invitation.key)

    def host(self, name: str) -> NamespaceHost:
        return self.network.hosts[self.names.index(name)]

    def kill(self, name: str) -> None:
        """As if the power of its host failed: all that runs there ends at once."""
        self.network.cut(self.host(name))  # Nobody hears a farewell.
        namespaces.end_processes(self.host(name))

    def revive(self, name: str) -> None:
        """Somebody has seen to it: its host is there again, with nothing of what it had."""
        assert self._invitation is not None
        self.network.heal(self.host(name))
        self._revived.append(self._start_agent(name, self._invitation, is_new=False))

    def close(self) -> None:
        """The run is over: nothing is left of those that it did not start."""
        for agent in self._revived:
            agent.abandon()


def run_in_namespaces(
    job: Job,
    folder: Path,
    network: Network,
    *,
    zygotes: Mapping[str, ZygoteProcess] | None = None,
    on_event: Callable[[Event, NamespaceStarter], None] = lambda event, starter: None,
) -> tuple[dict[str, Any], list[Event]]:
    """Run a job on the hosts of a network; its results, and what happened."""
    folder.mkdir(parents=True)
    starter, events = NamespaceStarter(network, zygotes=zygotes or {}), list[Event]()

    def listen(event: Event) -> None:
        events.append(event)
        on_event(event, starter)

    supervisor = Supervisor(replace(job, run_dir=str(folder)), listen, AgentEngine(starter))
    try:
        results = supervisor.run()
    finally:
        starter.close()
    starter.secrets.append(supervisor.machine.first_world.secret)
    return results, events


def namespaced(workers: int, hosts: int = 2, **more: Any) -> Cluster:
    """A cluster of so many hosts; `on` is a word for which `run_in_namespaces` has its own engine."""
    return Cluster(workers=workers, threads=1, on=f"local:{hosts}", **more)
