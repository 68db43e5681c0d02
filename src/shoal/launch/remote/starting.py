"""What an engine has to do: start an agent on each of its hosts. `launch/engines/` has the ways."""

from __future__ import annotations

import ipaddress
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import IO, Protocol, runtime_checkable

from shoal.comm.security import RunKey
from shoal.comm.tcp.addresses import own_address
from shoal.errors import LaunchError
from shoal.spec import Cluster

_END_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A host that is to take part, as the user names it."""

    name: str
    address: str = ""
    """Where it is reached, where its name does not say so."""
    cores: str = ""
    """What it is to give; nothing: all that it has."""
    workers: str = ""
    """How many it is to have at most; nothing: its share."""
    python: str = ""
    """With which Shoal is installed there; nothing: at the same path as here."""


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """What an agent must know to take part."""

    address: str
    """Where its supervisor listens."""
    key: RunKey
    """Of the run: for a pipe, or a file that nobody else can read."""
    ports: str = ""
    """Where processes on its host may listen; nothing: anywhere."""
    cluster: Cluster = field(default_factory=Cluster)
    """What the run asks of its hosts, for an engine that has to ask others for as much."""
    wants_end: Callable[[], bool] = lambda: False
    """Whether the user has asked for the end, for an engine that has to wait for hosts."""


class AgentHandle(Protocol):
    """An agent that was started, as whoever started it sees it."""

    name: str

    def failure(self) -> str | None:
        """Why it cannot join any more; None where it still may."""

    def close(self) -> None:
        """Wait a moment for its end, since it was dismissed, and end it where it has not."""

    def abandon(self) -> None:
        """End it at once: nothing has come of it."""


class Starter(Protocol):
    """Starts an agent on each of its hosts."""

    names: Sequence[str]
    """Of the hosts; empty where they are known when they come."""
    count: int
    patience_s: float
    """How long all of them together may take to join."""

    def own_address(self, interface: str) -> str:
        """Where agents can reach this host: at this network or address, or by route where none is named."""

    def start(self, invitation: Invitation) -> list[AgentHandle]:
        """Have agents come, of the first hosts where a run may not have all. LaunchError where that cannot be."""


@runtime_checkable
class KnownMeeting(Protocol):
    """A starter some of whose agents know already where to call, and have the run's key."""

    key: RunKey
    ports: str
    """Where the supervisor listens: one port."""


@runtime_checkable
class GrowingStarter(Protocol):
    """One that has hosts for a run that goes on, too."""

    def more(self, invitation: Invitation, count: int, there: Collection[str]) -> list[AgentHandle]:
        """Have so many more agents come, besides those of these names. LaunchError where that cannot be."""


@dataclass
class AgentProcess:
    """An agent that a command of ours runs."""

    name: str
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    """What it has written to its standard error."""

    @classmethod
    def run(cls, name: str, command: Sequence[str], key: RunKey) -> AgentProcess:
        """Run a command that becomes an agent, or reaches one; it gets the key through a pipe."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115  it is read as long as the process lives
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
        except OSError as error:
            errors.close()
            raise LaunchError(f"Host {name}: {command[0]} cannot be run ({error.strerror}).") from None
        started = cls(name, process, errors)
        try:
            assert process.stdin is not None
            process.stdin.write(f"{key.text}\n".encode())
            process.stdin.close()
        except OSError:
            pass  # It has ended already; `failure` says how.
        return started

    def failure(self) -> str | None:
        """Its last words, once it has ended."""
        if (code := self.process.poll()) is None:
            return None
        self.errors.seek(0)
        lines = self.errors.read().decode("utf-8", "replace").strip().splitlines()
        why = _gist(lines).removeprefix("error: ") or f"its agent ended with status {code}."
        return f"Host {self.name} could not join: {why}"

    def close(self) -> None:
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()

    def abandon(self) -> None:
        self.process.terminate()
        self.close()


def _gist(lines: Sequence[str]) -> str:
    """The line that says why: the last one, or where a launcher draws a box around general advice, the first."""
    said = [line.strip() for line in lines if line.strip(" -=")]
    is_boxed = bool(lines) and not lines[-1].strip(" -=")
    return (said[0] if is_boxed else said[-1]) if said else ""


def not_there(names: Iterable[str], count: int, there: Collection[str], remedy: str) -> list[str]:
    """So many of these hosts that are not there. LaunchError where there are fewer, with what to do about it."""
    free = [name for name in names if name not in there]
    if len(free) < count:
        raise LaunchError(
            f"{count} more hosts were asked for, but of those that this run may have {len(free)} are not there; "
            f"{remedy}."
        )
    return free[:count]


def agent_command(invitation: Invitation, candidate: Candidate) -> list[str]:
    """What runs on a host. The key is read from standard input, so that no list of processes shows it."""
    python = candidate.python or sys.executable
    more = ["--cores", candidate.cores] if candidate.cores else []
    more += ["--workers", candidate.workers] if candidate.workers else []
    more += ["--ports", invitation.ports] if invitation.ports else []
    return [python, "-P", "-m", "shoal.cli", "host", "--join", invitation.address, *more, "--name", candidate.name]


def read_ticket(path: str) -> RunKey:
    """The run's key, from a file that is this user's alone, or from standard input (`-`)."""
    if path != "-":
        return RunKey.load(path)
    return RunKey.from_text(sys.stdin.readline().strip())


def address_towards(host: str, interface: str) -> str:
    """This machine's address on the way to a host, or at the interface or address that was named."""
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        return own_address(host, interface)
