"""What runs in tasks of Spark's: some of them become agents. No Spark here but its context in a task.

First a barrier stage shows that all tasks run at once, and what each executor's key is to be sealed with; the
secret half stays in a file of the executor's own folder. Then a stage of as many tasks runs the agents: one in
each executor, where the others wait for its end. That one is no barrier: there Spark would end all with the first.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shoal.comm.sealing import SealingPair
from shoal.launch.remote.starting import AgentProcess, Candidate, Invitation, agent_command


@dataclass(frozen=True, kw_only=True)
class AgentPlan:
    """What one executor's agent must know."""

    name: str
    address: str
    ports: str
    cores: int
    sealed: bytes


def show_executor(nonce: str, _: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """A task of the barrier stage: the executor's address and public key, once for each executor."""
    from pyspark import BarrierTaskContext

    context = BarrierTaskContext.get()
    public = ""
    try:
        fd = os.open(_file_of(nonce), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        pass  # Another task of this executor was faster.
    else:
        pair = SealingPair.create()
        with os.fdopen(fd, "wb") as file:
            file.write(pair.secret)
        public = pair.public.hex()
    context.barrier()
    yield context.getTaskInfos()[context.partitionId()].address, public


def run_agent(nonce: str, plans: dict[str, AgentPlan], _: Iterable[Any]) -> Iterator[str]:
    """A task of the second stage: the first of each executor runs its agent, the others wait for its end."""
    try:
        file = open(_file_of(nonce), "r+b")  # noqa: SIM115  its lock lasts as long as the agent
    except FileNotFoundError:
        return  # The agent that it was for has ended.
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not (secret := file.read()):
            return
        file.truncate(0)
        try:
            pair = SealingPair.of(secret)
            if (plan := plans.get(pair.public.hex())) is not None:
                yield _run(plan, pair)
        finally:
            os.unlink(_file_of(nonce))


def _run(plan: AgentPlan, pair: SealingPair) -> str:
    invitation = Invitation(address=plan.address, key=pair.open(plan.sealed), ports=plan.ports)
    command = agent_command(invitation, Candidate(name=plan.name, cores=str(plan.cores)))
    # Spark ends a task by ending the Python that runs it, whose first thread this is.
    agent = AgentProcess.run(plan.name, [*command, "--owner", str(os.getpid())], invitation.key)
    agent.process.wait()
    return agent.failure() or ""


def _file_of(nonce: str) -> str:
    """In the folder that an executor runs in, which is its alone."""
    return f".shoal-{nonce}"
