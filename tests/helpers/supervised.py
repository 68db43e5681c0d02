"""A supervisor's machine on a table: a test says what happens and when, and reads what it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.comm.words import FROM_PROCESSES, understood
from shoal.launch.machine import SupervisorMachine
from shoal.launch.messages import Emit, Ended, Input, Output, Said, Say, Started, StartProcess
from shoal.launch.worlds import plan_worlds
from shoal.spec import Job
from shoal.spec.host_facts import HostFacts


@dataclass
class Table:
    """A machine, its time, and all that it has asked for."""

    job: Job
    now: float = 100.0
    hosts: Sequence[HostFacts] = (HostFacts(),)
    asked: list[Output] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = SupervisorMachine(self.job, self.now)
        self.machine.begin(plan_worlds(self.job, self.hosts), self.hosts, self.now)
        self._keep()

    def tell(self, *news: Input) -> list[Output]:
        """Let these things happen now; what is asked for then."""
        for one in news:
            self.machine.take(one, self.now)
        return self.wait(0.0)

    def say(self, process: int, kind: str, **values: Any) -> list[Output]:
        """Let a process say something; what is asked for then."""
        return self.tell(Said(process, understood({"kind": kind, **values}, FROM_PROCESSES)))

    def end(self, process: int, exit_code: int = 0, **more: Any) -> list[Output]:
        """Let a process end; what is asked for then."""
        return self.tell(Ended(process=process, exit_code=exit_code, **more))

    def wait(self, seconds: float) -> list[Output]:
        """Let time pass; what is asked for then."""
        self.now += seconds
        self.machine.act(self.now)
        return self._keep()

    def begin(self, *processes: int) -> None:
        """Let processes start and become ready, and workers train; all of them unless said otherwise."""
        for number in processes or range(len(self.machine.crew.hands)):
            self.tell(Started(number))
            self.say(number, "state", state="ready", step=0)
            if self.machine.crew.hands[number].is_worker:
                self.say(number, "state", state="training", step=0)

    def _keep(self) -> list[Output]:
        asked = list(self.machine.outputs)
        self.machine.outputs.clear()
        self.asked += asked
        return asked


def of(kind: type[Any], outputs: list[Output]) -> list[Any]:
    """The outputs of a kind."""
    return [one for one in outputs if isinstance(one, kind)]


def events(kind: str, outputs: list[Output]) -> list[dict[str, Any]]:
    """What the events of a kind said."""
    return [one.what.plain() for one in of(Emit, outputs) if one.what.kind_name == kind]


def said_to(process: int, outputs: list[Output]) -> list[dict[str, Any]]:
    """What a process was told."""
    return [one.word.as_message() for one in of(Say, outputs) if one.process == process]


def started(outputs: list[Output]) -> list[tuple[int, str, int]]:
    """Number, role and rank of the processes that were started."""
    return [(one.process, one.world.role, one.world.global_rank) for one in of(StartProcess, outputs)]
