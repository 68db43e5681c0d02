"""`--on k8s`: the pods of a Kubernetes job. Each runs the same command, and finds by its environment who it is.

The first is the supervisor's, and has an agent as well; all others become agents, which call the first by the
name that the job's headless service gives it. `shoal k8s` writes manifests that set all this.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field

from shoal.comm.security import RunKey
from shoal.comm.tcp.addresses import split_address
from shoal.errors import CommError, LaunchError, SpecError
from shoal.launch.remote.agent import SupervisorGone, join
from shoal.launch.remote.probing import AgentState, leave_sign
from shoal.launch.remote.starting import (
    AgentHandle,
    AgentProcess,
    Candidate,
    Invitation,
    address_towards,
    agent_command,
)

ENGINE = "k8s"
INDEX, HOSTS, MEETING = "JOB_COMPLETION_INDEX", "SHOAL_HOSTS", "SHOAL_MEETING"
"""Which pod this is (set by Kubernetes), how many there are, and where the first listens."""
ADDRESS, KEY, LINGER = "SHOAL_ADDRESS", "SHOAL_KEY", "SHOAL_LINGER_S"
"""This pod's own address, the run's key, and how long a pod that was sent away waits for another supervisor."""
_JOIN_S = 600.0
"""Pods are scheduled when there is room, and images are pulled: the others may be there long before the first."""
_CALL_S = 5.0
_CALL_AGAIN_S = 0.5
_LINGER_S = 15.0


@dataclass(frozen=True, kw_only=True)
class PodWorld:
    """Where a pod stands among those of its job."""

    index: int
    hosts: int
    meeting: str
    """Where the first pod listens, as `tcp://name:port`."""
    key: RunKey = field(repr=False)
    address: str = ""
    """This pod's own; none: that of its name."""
    linger_s: float = _LINGER_S

    @classmethod
    def found(cls, environment: Mapping[str, str]) -> PodWorld:
        """By the environment; SpecError where it is not that of a pod of such a job."""
        if missing := [name for name in (INDEX, HOSTS, MEETING, KEY) if not environment.get(name)]:
            raise SpecError(
                f"--on {ENGINE} is for pods that the manifests of `shoal k8s` describe, but {', '.join(missing)} "
                "is not in the environment; write and apply these, or name hosts with --on ssh:a,b."
            )
        index, hosts = (_number(environment, name) for name in (INDEX, HOSTS))
        if not 0 <= index < hosts:
            raise SpecError(f"{INDEX}={index} names none of the {hosts} pods that {HOSTS} promises.")
        split_address(environment[MEETING])
        return cls(
            index=index,
            hosts=hosts,
            meeting=environment[MEETING],
            key=RunKey.from_text(environment[KEY]),
            address=environment.get(ADDRESS, ""),
            linger_s=_number(environment, LINGER) if LINGER in environment else _LINGER_S,
        )

    @property
    def name(self) -> str:
        """What this pod's host is called in the run."""
        return f"pod-{self.index}"


def _number(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].isdecimal():
        raise SpecError(f"{name} must be a number, found {environment[name]!r}.")
    return int(environment[name])


def take_part(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Be an agent for as long as there is a supervisor, in all pods but the first; whether this is none."""
    world = PodWorld.found(environment)
    if world.index == 0:
        return False
    # No process that this one starts has any use for it.
    environment.pop(KEY)
    follow(world)
    return True


def follow(world: PodWorld) -> None:
    """Join the run, and join again where its supervisor is gone and followed by another, until none comes.

    A supervisor that begins again, and a pod that Kubernetes starts in place of the first, call all others anew.
    """
    deadline, has_joined = time.monotonic() + _JOIN_S, False
    while True:
        leave_sign(AgentState.CALLING)
        try:
            join(world.meeting, world.key, name=world.name, interface=world.address, timeout_s=_CALL_S)
            has_joined = True
            deadline = time.monotonic() + world.linger_s
        except SupervisorGone:
            has_joined, deadline = False, time.monotonic() + _JOIN_S
        except (CommError, SpecError) as error:  # Nobody listens there, or the first pod has no name yet.
            if time.monotonic() > deadline:
                if has_joined:
                    return
                raise LaunchError(f"No supervisor was found at {world.meeting}: {error}") from None
            time.sleep(_CALL_AGAIN_S)


def make(nothing: str, tell: Callable[[str], None]) -> PodStarter:
    """Of `k8s`, in the first pod."""
    if nothing:
        raise SpecError(f"--on {ENGINE}:{nothing} names something, but pods are found by their environment.")
    starter = PodStarter(PodWorld.found(os.environ))
    os.environ.pop(KEY)
    return starter


class PodStarter:
    """The pods of this job: an agent is started in this one, and the others come by themselves."""

    patience_s = _JOIN_S

    def __init__(self, world: PodWorld) -> None:
        self._world = world
        self.count = world.hosts
        self.names = [f"pod-{index}" for index in range(world.hosts)]
        self.key = world.key
        self.ports = split_address(world.meeting)[1]

    def own_address(self, interface: str) -> str:
        first = split_address(self._world.meeting)[0]
        return address_towards(first, interface or self._world.address)

    def start(self, invitation: Invitation) -> list[AgentHandle]:
        command = agent_command(invitation, Candidate(name=self._world.name))
        return [AgentProcess.run(self._world.name, command, invitation.key)]
