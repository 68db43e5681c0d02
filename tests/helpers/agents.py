"""Agents of this machine as hosts of a run, which a test can end while the run goes on."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.launch.engines.here import HereStarter
from shoal.launch.remote.gathering import AgentEngine
from shoal.launch.remote.remote_host import LEASE_S
from shoal.launch.remote.starting import AgentHandle, AgentProcess, Invitation
from shoal.launch.supervisor import Supervisor
from shoal.observe import Event
from shoal.spec import Cluster, Job


class SeenStarter(HereStarter):
    """Agents here, by name."""

    agents: dict[str, AgentProcess]

    def start(self, invitation: Invitation) -> list[AgentHandle]:
        started = super().start(invitation)
        self.agents = {agent.name: agent for agent in started if isinstance(agent, AgentProcess)}
        return started

    def kill(self, name: str) -> None:
        """As if the power of its host failed."""
        self.agents[name].process.send_signal(signal.SIGKILL)

    def silence(self, name: str) -> None:
        """As if the way to it were cut."""
        self.agents[name].process.send_signal(signal.SIGSTOP)

    def heal(self, name: str) -> None:
        """As if it were there again."""
        self.agents[name].process.send_signal(signal.SIGCONT)


def run_on_hosts(
    job: Job,
    folder: Path,
    *,
    hosts: int = 2,
    on_event: Callable[[Event, SeenStarter], None] = lambda event, starter: None,
    lease_s: float = LEASE_S,
) -> tuple[dict[str, Any], list[Event]]:
    """Run a job on so many agents of this machine; its results, and what happened."""
    folder.mkdir(parents=True)
    starter, events = SeenStarter(hosts), list[Event]()

    def listen(event: Event) -> None:
        events.append(event)
        on_event(event, starter)

    job = replace(job, run_dir=str(folder))
    return Supervisor(job, listen, AgentEngine(starter, lease_s=lease_s)).run(), events


def spread_cluster(workers: int, hosts: int = 2) -> Cluster:
    return Cluster(workers=workers, threads=1, on=f"local:{hosts}")


class LostHosts:
    """Kills the agents of hosts while a run trains, one after the other has been followed."""

    def __init__(self, *victims: str, signs: Path | None = None) -> None:
        self._victims = list(victims)
        self._signs = signs
        self._is_due = True

    def __call__(self, event: Event, starter: SeenStarter) -> None:
        if event.kind == "replaced":
            self._is_due = True
            if not self._victims and self._signs is not None:
                (self._signs / "hurry").touch()
        elif event.kind == "steps" and self._is_due and self._victims:
            self._is_due = False
            starter.kill(self._victims.pop(0))
