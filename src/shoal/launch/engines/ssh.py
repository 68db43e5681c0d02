"""`--on ssh:a,b` and `--on hosts:FILE`: hosts that ssh reaches without asking for anything."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import SpecError
from shoal.launch.remote.starting import (
    AgentHandle,
    AgentProcess,
    Candidate,
    Invitation,
    address_towards,
    agent_command,
    not_there,
)

SSH_VARIABLE = "SHOAL_SSH"
"""The command that reaches other hosts, where it is not plain ssh: `ssh -p 2222`."""
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
_HOST_KEYS = ("address", "cores", "workers", "python")


def make(written: str, tell: Callable[[str], None]) -> SshStarter:
    """Of `ssh:a,b`."""
    return SshStarter([Candidate(name=name) for name in written.split(",")])


def make_listed(path: str, tell: Callable[[str], None]) -> SshStarter:
    """Of `hosts:FILE`."""
    return SshStarter(read_hosts(Path(path)), file=Path(path))


@dataclass
class SshStarter:
    """Hosts that ssh reaches without asking for anything."""

    candidates: Sequence[Candidate]
    patience_s: float = 15.0
    file: Path | None = None
    """Where they were read, and more may be written while the run goes on."""
    names: Sequence[str] = field(init=False)
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.names = [one.name for one in self.candidates]
        self.count = len(self.names)

    def own_address(self, interface: str) -> str:
        first = self.candidates[0]
        return address_towards(first.address or first.name.rpartition("@")[2], interface)

    def start(self, invitation: Invitation) -> list[AgentHandle]:
        first = self.candidates[: invitation.cluster.max_hosts]
        self.names, self.count = [one.name for one in first], len(first)
        return self._reach(invitation, first)

    def more(self, invitation: Invitation, count: int, there: Collection[str]) -> list[AgentHandle]:
        """Those of the named hosts that were lost, or left, or are new in the file."""
        known = {one.name: one for one in (self.candidates if self.file is None else read_hosts(self.file))}
        remedy = "name more when a run is started" if self.file is None else f"add lines to {self.file}"
        return self._reach(invitation, [known[name] for name in not_there(known, count, there, remedy)])

    def _reach(self, invitation: Invitation, candidates: Sequence[Candidate]) -> list[AgentHandle]:
        reach = shlex.split(os.environ.get(SSH_VARIABLE, SSH))
        return [
            AgentProcess.run(
                one.name, [*reach, one.name, shlex.join(agent_command(invitation, one))], invitation.key
            )
            for one in candidates
        ]


def read_hosts(path: Path) -> list[Candidate]:
    """The hosts of a file: a name in each line, and `address=`, `cores=`, `workers=` or `python=` behind it."""
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
    numbers = [given.get("cores", "1"), given.get("workers", "1")]
    if name.startswith("-") or "=" in name or unknown or not all(one.isdecimal() for one in numbers):
        raise SpecError(
            f"Cluster: line {number} of {path} must be a host's name, then any of address=…, cores=N, workers=N "
            f"and python=…, found {' '.join([name, *(f'{key}={value}' for key, value in given.items())])!r}."
        )
