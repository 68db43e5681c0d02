"""What the supervisor's machine is told and what it asks for: plain data, without files, sockets or process ids.

A process is a number that the machine gave it, whichever host it runs on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from shoal.comm.words import ScaleAnswered
from shoal.observe.happenings import Happening
from shoal.spec import World
from shoal.spec.host_facts import HostFacts
from shoal.spec.told import Told

# What happens.


@dataclass(frozen=True)
class Started:
    """A process runs."""

    process: int


@dataclass(frozen=True)
class Said:
    """A process has said something."""

    process: int
    word: Told


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process has been reaped: nothing of it can touch shared memory any more. All it said was told before."""

    process: int
    exit_code: int
    """Negative for the signal that ended it."""
    log_name: str = ""
    """Where its output is, for people."""
    last_output: str = ""
    ran_out_of_memory: bool = False
    """The kernel has killed for want of memory meanwhile."""
    lost_host: str = ""
    """Where its host is gone, and nobody can tell how it ended: the name of that."""
    lost_why: str = ""
    """And why that is gone, in a sentence."""


@dataclass(frozen=True)
class Deaf:
    """A process reads nothing of what it is told, and more waits for it than may."""

    process: int


@dataclass(frozen=True)
class HostFailed:
    """Processes cannot be started or watched any more, for this reason."""

    text: str


@dataclass(frozen=True)
class HostLost:
    """One of several hosts is gone, for this reason. What its processes said was told before."""

    host: int
    text: str


@dataclass(frozen=True)
class HostCame:
    """One more host is there; its number is the next one."""

    facts: HostFacts


@dataclass(frozen=True, kw_only=True)
class ScaleRequest:
    """So many workers and servers are wanted, or hosts; where none is said, the question is how many there are."""

    number: int
    """To be answered under."""
    workers: int | None = None
    servers: int | None = None
    hosts: str | None = None

    @property
    def is_question(self) -> bool:
        """Whether nothing is to be changed."""
        return self.workers is None and self.servers is None and self.hosts is None


@dataclass(frozen=True)
class Interrupt:
    """The user asks the run to end: Ctrl-C, or SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What could be seen of a process from outside."""

    stacks: str = ""
    state: str | None = None
    """Why it does not run, by what the system says; None where it could."""


@dataclass(frozen=True)
class StacksTaken:
    """The answer to `TakeStacks`."""

    sights: dict[int, Sight]
    path: str = ""
    """Where the stacks were kept, if they were."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What else the machine does: the answer to `MeasureLoad`."""

    idle_cores: float
    waiting: float
    """Processes that would run if there were more cores."""


News: TypeAlias = Started | Said | Ended | Deaf
"""What a host tells of its processes."""
Input: TypeAlias = News | HostFailed | HostLost | HostCame | ScaleRequest | Interrupt | StacksTaken | Load


# What is to be done, in this order.


@dataclass(frozen=True)
class StartProcess:
    """Start a process; from now on it is called by this number."""

    process: int
    world: World


@dataclass(frozen=True)
class Say:
    """Say something to a process, if it still lives."""

    process: int
    word: Told


@dataclass(frozen=True)
class Signal:
    """Send a signal to a process, if it still lives."""

    process: int
    signum: int


@dataclass(frozen=True)
class Emit:
    """Tell whoever watches."""

    what: Happening
    rank: int | None = None


@dataclass(frozen=True)
class Answer:
    """Answer a request of the user's."""

    request: int
    answer: ScaleAnswered


@dataclass(frozen=True)
class TakeStacks:
    """See where processes are, and keep it under this step."""

    names: dict[int, str]
    step: int


@dataclass(frozen=True)
class MeasureLoad:
    """See what else the machine does."""


@dataclass(frozen=True)
class WantHosts:
    """Have so many more hosts come, and answer this request of the user's."""

    request: int | None
    """None: the run asks by itself, and again where there are none."""
    count: int


@dataclass(frozen=True)
class LetGo:
    """Let a host leave, with all that runs there; it is lost then."""

    host: int


Output: TypeAlias = StartProcess | Say | Signal | Emit | Answer | TakeStacks | MeasureLoad | WantHosts | LetGo


@dataclass(frozen=True)
class Over:
    """The run has ended: with these results, or with this error."""

    results: dict[str, Any]
    error: Exception | None = None
