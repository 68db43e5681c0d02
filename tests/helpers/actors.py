"""An engine of small plain processes that play the members of a run by a script."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.comm.channel import Channel
from shoal.launch import Member
from shoal.spec import Job, World

GUARD_S = 30.0


@dataclass
class ActorHandle:
    """Processes of our own. Each gets its role, number, channel, the part given to all, and its node."""

    script: str
    part: Any
    worlds: list[World] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    pidfds: list[int] = field(default_factory=list)
    deaths: select.epoll = field(default_factory=select.epoll)

    def fileno(self) -> int:
        return self.deaths.fileno()

    def add(self, world: World) -> Member:
        ours, theirs = Channel.pair()
        identity = [world.role, world.global_rank, theirs.fileno(), json.dumps(self.part), world.node]
        process = subprocess.Popen(
            [sys.executable, "-c", self.script, *map(str, identity)], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self.processes.append(process)
        self.pidfds.append(os.pidfd_open(process.pid))
        self.deaths.register(self.pidfds[-1], select.EPOLLIN | select.EPOLLONESHOT)
        self.worlds.append(world)
        self.members.append(Member(world.role, world.global_rank, ours, "", pid=process.pid, node=world.node))
        return self.members[-1]

    def collect(self) -> list[Member]:
        ended = []
        self.deaths.poll(0)
        for member, process in zip(self.members, self.processes, strict=True):
            if member.is_alive and process.poll() is not None:
                member.exit_code = process.returncode
                ended.append(member)
        return ended

    def signal(self, member: Member, signum: int) -> None:
        self.processes[self.members.index(member)].send_signal(signum)

    def wait(self, timeout_s: float) -> bool:
        for process in self.processes:
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return False
        return True

    def last_output(self, member: Member) -> str:
        return ""

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(GUARD_S)
        self.deaths.close()
        for pidfd in self.pidfds:
            os.close(pidfd)

    def exit_codes(self, role: str) -> list[int | None]:
        """How the members of a role ended, in the order they were started."""
        pairs = zip(self.worlds, self.processes, strict=True)
        return [process.returncode for world, process in pairs if world.role == role]


@dataclass
class ActorEngine:
    """Starts actors who all follow one script, each in its own part."""

    script: str
    part: Any
    job: Job | None = None
    handle: ActorHandle | None = None

    def start(self, job: Job, worlds: Sequence[World]) -> ActorHandle:
        self.job = job
        self.handle = ActorHandle(self.script, self.part)
        for world in worlds:
            self.handle.add(world)
        return self.handle
