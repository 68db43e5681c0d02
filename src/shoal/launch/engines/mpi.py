"""`--on mpi` and `--on mpi:a,b`: hosts that mpirun reaches, where it has not started this process itself."""

from __future__ import annotations

import os
import shlex
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

MPIRUN_VARIABLE = "SHOAL_MPIRUN"
"""The command that starts processes, where it is not plain mpirun: `mpirun --hostfile nodes`."""
_ASK_S = 10.0


def make(written: str, tell: Callable[[str], None]) -> MpiStarter:
    """Of `mpi`, or `mpi:a,b`."""
    mpirun = shlex.split(os.environ.get(MPIRUN_VARIABLE, "mpirun"))
    return MpiStarter(written.split(",") if written else _hosts_of(mpirun), mpirun)


@dataclass
class MpiStarter:
    """Hosts that mpirun reaches. It is run once for each: it hands its standard input to one process alone, and
    the key must not go another way."""

    names: Sequence[str]
    mpirun: Sequence[str]
    patience_s: float = 15.0
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.names)
        self._all = self.names

    def own_address(self, interface: str) -> str:
        try:
            return address_towards(self.names[0], interface)
        except LaunchError:
            return way_out(interface)  # Only mpirun's own way of starting knows that name.

    def start(self, invitation: Invitation) -> list[AgentHandle]:
        self.names = self._all[: invitation.cluster.max_hosts]
        self.count = len(self.names)
        return [self._reach(name, invitation) for name in self.names]

    def more(self, invitation: Invitation, count: int, there: Collection[str]) -> list[AgentHandle]:
        """Those of these hosts that were lost, or left."""
        found = not_there(self._all, count, there, "name more when a run is started")
        return [self._reach(name, invitation) for name in found]

    def _reach(self, name: str, invitation: Invitation) -> AgentProcess:
        # A lone process would be bound to one core, and all workers of the host with it.
        words = [*self.mpirun, "--host", name, "-np", "1", "--bind-to", "none"]
        return AgentProcess.run(name, [*words, *agent_command(invitation, Candidate(name=name))], invitation.key)


def _hosts_of(mpirun: Sequence[str]) -> list[str]:
    """The hosts that mpirun would use by itself: those of its host file, or of an allocation."""
    words = [*mpirun, "--map-by", "ppr:1:node", "hostname"]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except OSError as error:
        raise LaunchError(
            f"{mpirun[0]} cannot be run ({error.strerror}); install an MPI (Debian: openmpi-bin), name its mpirun "
            f"with {MPIRUN_VARIABLE}, or use another engine."
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{shlex.join(words)} did not answer within {_ASK_S:.0f} s; try it by hand.") from None
    if done.returncode or not (names := done.stdout.split()):
        lines = [line for line in done.stderr.splitlines() if line.strip(" -")]
        raise LaunchError(f"{shlex.join(words)} failed: {' '.join(lines[:3]) or f'status {done.returncode}'}")
    return names
