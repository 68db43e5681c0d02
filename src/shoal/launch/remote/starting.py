"""How agents are started: by ssh, on this machine, or by hand. An engine is one of these, and little else."""

from __future__ import annotations

import ipaddress
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from shoal.comm.security import RunKey
from shoal.comm.tcp.addresses import own_address
from shoal.errors import LaunchError, SpecError
from shoal.observe.wording import plural
from shoal.spec import Cluster
from shoal.spec.world import LOOPBACK

SSH_VARIABLE = "SHOAL_SSH"
"""The command that reaches other hosts, where it is not plain ssh: `ssh -p 2222`."""
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
_ELSEWHERE = "192.0.2.1"
"""An address that nobody has: the way there is the way out of this machine."""
_END_S = 5.0
_HOST_KEYS = ("address", "cores", "python")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A host that is to take part, as the user names it."""

    name: str
    address: str = ""
    """Where it is reached, where its name does not say so."""
    cores: str = ""
    """What it is to give; nothing: all that it has."""
    python: str = ""
    """With which Shoal is installed there; nothing: at the same path as here."""


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

    def start(self, address: str, key: RunKey) -> list[AgentHandle]:
        """Have agents call this address. LaunchError where that cannot be."""


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
        why = lines[-1].removeprefix("error: ") if lines else f"its agent ended with status {code}."
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


def agent_command(address: str, candidate: Candidate) -> list[str]:
    """What runs on a host. The key is read from standard input, so that no list of processes shows it."""
    python = candidate.python or sys.executable
    more = ["--cores", candidate.cores] if candidate.cores else []
    return [python, "-P", "-m", "shoal.cli", "host", "--join", address, "--name", candidate.name, *more]


@dataclass
class SshStarter:
    """Hosts that ssh reaches without asking for anything."""

    candidates: Sequence[Candidate]
    patience_s: float = 15.0
    names: Sequence[str] = field(init=False)
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.names = [one.name for one in self.candidates]
        self.count = len(self.names)

    def own_address(self, interface: str) -> str:
        first = self.candidates[0]
        return address_towards(first.address or first.name.rpartition("@")[2], interface)

    def start(self, address: str, key: RunKey) -> list[AgentHandle]:
        reach = shlex.split(os.environ.get(SSH_VARIABLE, _SSH))
        return [
            AgentProcess.run(one.name, [*reach, one.name, shlex.join(agent_command(address, one))], key)
            for one in self.candidates
        ]


@dataclass
class HereStarter:
    """Agents on this machine, as if each had one of its own: to try what runs on several hosts."""

    count: int
    patience_s: float = 15.0

    def __post_init__(self) -> None:
        self.names: Sequence[str] = [f"host-{number}" for number in range(self.count)]

    def own_address(self, interface: str) -> str:
        return address_towards(LOOPBACK, interface)

    def start(self, address: str, key: RunKey) -> list[AgentHandle]:
        return [AgentProcess.run(name, agent_command(address, Candidate(name=name)), key) for name in self.names]


@dataclass
class HandStarter:
    """Hosts on which somebody starts an agent by hand, with the ticket that this leaves in a file."""

    count: int
    tell: Callable[[str], None]
    patience_s: float = 3600.0
    names: Sequence[str] = ()

    def own_address(self, interface: str) -> str:
        try:
            return address_towards(_ELSEWHERE, interface)
        except LaunchError:
            return LOOPBACK  # It has no network at all.

    def start(self, address: str, key: RunKey) -> list[AgentHandle]:
        ticket = Ticket()
        key.save(ticket.path)
        self.tell(
            f"waiting for {plural(self.count, 'host')}; run there: shoal host --join {address} --ticket "
            f"{ticket.path} (a copy of this file, which is a key: keep it to yourself)"
        )
        return [ticket]


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


def starter_of(cluster: Cluster, tell: Callable[[str], None]) -> Starter:
    """What `on=` names; `tell` takes a line for the user."""
    match cluster.engine, cluster.engine_argument:
        case "ssh", written:
            return SshStarter([Candidate(name=name) for name in written.split(",")])
        case "hosts", path:
            return SshStarter(read_hosts(Path(path)))
        case "local", count:
            return HereStarter(int(count))
        case "join", count:
            return HandStarter(int(count), tell)
    raise SpecError(f"Cluster: nobody starts agents for on={cluster.on}.")


def read_hosts(path: Path) -> list[Candidate]:
    """The hosts of a file: a name in each line, and `address=`, `cores=` or `python=` behind it."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SpecError(f"Cluster: the list of hosts {path} cannot be read ({error.strerror}).") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not (words := line.partition("#")[0].split()):
            continue
        name, *pairs = words
        given = dict(pair.partition("=")[::2] for pair in pairs)
        _check_line(path, number, name, given)
        found.append(Candidate(name=name, **given))
    if not found:
        raise SpecError(f"Cluster: the list of hosts {path} names none; write one in each line.")
    return found


def _check_line(path: Path, number: int, name: str, given: Mapping[str, str]) -> None:
    unknown = [key for key, value in given.items() if key not in _HOST_KEYS or not value]
    if name.startswith("-") or "=" in name or unknown or not given.get("cores", "1").isdecimal():
        raise SpecError(
            f"Cluster: line {number} of {path} must be a host's name, then any of address=…, cores=N and "
            f"python=…, found {' '.join([name, *(f'{key}={value}' for key, value in given.items())])!r}."
        )
