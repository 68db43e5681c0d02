"""`--on slurm`: the hosts of an allocation of Slurm's, on which nothing runs yet."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from shoal.errors import LaunchError
from shoal.launch.engines.by_hand import way_out
from shoal.launch.remote.starting import (
    AgentHandle,
    AgentProcess,
    Candidate,
    Invitation,
    address_towards,
    agent_command,
    not_there,
)

NODES_VARIABLE = "SLURM_JOB_NODELIST"
CORES_VARIABLE = "SLURM_JOB_CPUS_PER_NODE"
_ASK_S = 10.0


def make(written: str, tell: Callable[[str], None]) -> SlurmStarter:
    """Of `slurm`."""
    if not (nodes := os.environ.get(NODES_VARIABLE)):
        raise LaunchError(
            "on=slurm uses the hosts of an allocation, but there is none here; write `shoal slurm TASK --nodes "
            "2`, or begin in `salloc --nodes 2`."
        )
    if shutil.which("srun") is None:
        raise LaunchError("srun is not installed on this host, which on=slurm starts agents with.")
    return SlurmStarter(_names_of(nodes), expand_counts(os.environ.get(CORES_VARIABLE, "")))


@dataclass
class SlurmStarter:
    """Hosts on which srun starts an agent. Each has a step of its own: the loss of one ends no other."""

    names: Sequence[str]
    cores: Sequence[int] = ()
    """What the job has of each, where that is known."""
    patience_s: float = 30.0
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.names)
        self._all = self.names

    def own_address(self, interface: str) -> str:
        try:
            return address_towards(self.names[-1], interface)
        except LaunchError:
            return way_out(interface)  # Only Slurm knows that name.

    def start(self, invitation: Invitation) -> list[AgentHandle]:
        self.names = self._all[: invitation.cluster.max_hosts]
        self.count = len(self.names)
        return [self._reach(name, self._cores_of(name), invitation) for name in self.names]

    def more(self, invitation: Invitation, count: int, there: Collection[str]) -> list[AgentHandle]:
        """Those of the allocation that were lost, or left, and are up again."""
        found = not_there(self._all, count, there, "ask for more with `shoal slurm --nodes`")
        return [self._reach(name, self._cores_of(name), invitation) for name in found]

    def _cores_of(self, name: str) -> int:
        return self.cores[self._all.index(name)] if len(self.cores) == len(self._all) else 0

    def _reach(self, name: str, cores: int, invitation: Invitation) -> AgentProcess:
        """An agent has all that the job has of its host, which a step would not get by itself; what it is given to
        read goes to it alone."""
        words = ["srun", f"--nodelist={name}", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--overlap"]
        words += ["--cpu-bind=none", "--quiet", *([f"--cpus-per-task={cores}"] if cores else [])]
        candidate = Candidate(name=name, cores=str(cores) if cores else "")
        return AgentProcess.run(name, [*words, *agent_command(invitation, candidate)], invitation.key)


def expand_counts(text: str) -> list[int]:
    """`8(x2),4` is 8, 8 and 4: what a job has of each host, as Slurm writes it. Nothing where it does not."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        if (match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)) is None:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _names_of(nodes: str) -> list[str]:
    """`n[1-2]` is n1 and n2."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=_ASK_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"scontrol does not say which hosts {nodes} are: {error}") from None
    return done.stdout.split()
