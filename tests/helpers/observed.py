"""An engine whose processes a test can see and send signals to, while the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.launch.crew import Crew, Hand
from shoal.launch.local import LocalEngine, LocalHost
from shoal.launch.supervisor import Supervisor
from shoal.observe import Event
from shoal.spec import Job


class ObservedEngine(LocalEngine):
    """This host; knows what its supervisor knows."""

    crew: Crew
    host: LocalHost

    def open(self, job: Job) -> LocalHost:
        self.host = super().open(job)
        return self.host

    def run(self, job: Job, on_event: Callable[[Event], None]) -> dict[str, Any]:
        """Run a job here to its end; its results."""
        supervisor = Supervisor(job, on_event, self)
        self.crew = supervisor.machine.crew
        return supervisor.run()

    def running(self, *roles: str) -> list[Hand]:
        """The processes of these roles that run; without any, of all roles."""
        return [one for one in self.crew.living(*roles) if one.is_started]

    def signal(self, hand: Hand, signum: int) -> None:
        """Send a signal to one of them."""
        self.host.signal(hand.number, signum)

    def pid_of(self, hand: Hand) -> int:
        """Its process id."""
        pid = self.host.processes[hand.number].pid
        assert pid is not None
        return pid
