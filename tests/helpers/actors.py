"""A host of small plain processes that play the members of a run by a script."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from shoal.launch.links import Links
from shoal.launch.messages import Ended, Load, News, Sight, Started
from shoal.launch.stacks import explain_state
from shoal.spec import Job, World
from shoal.spec.host_facts import HostFacts
from shoal.spec.told import Told

GUARD_S = 30.0


@dataclass
class ActorHost:
    """Processes of our own. Each gets its role, number, channel, the part given to all, and its node."""

    script: str
    part: Any
    worlds: list[World] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    pidfds: list[int] = field(default_factory=list)
    links: Links = field(default_factory=Links)
    news: select.epoll = field(default_factory=select.epoll)
    told: list[News] = field(default_factory=list)
    living: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.news.register(self.links, select.EPOLLIN)

    @property
    def facts(self) -> HostFacts:
        return HostFacts()

    def fileno(self) -> int:
        return self.news.fileno()

    def start(self, process: int, world: World) -> None:
        assert process == len(self.processes)
        theirs = self.links.open(process)
        identity = [world.role, world.global_rank, theirs.fileno(), json.dumps(self.part), world.node]
        started = subprocess.Popen(
            [sys.executable, "-c", self.script, *map(str, identity)], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self.processes.append(started)
        self.pidfds.append(os.pidfd_open(started.pid))
        self.news.register(self.pidfds[-1], select.EPOLLIN | select.EPOLLONESHOT)
        self.worlds.append(world)
        self.living.add(process)
        self.told.append(Started(process))

    def collect(self) -> list[News]:
        told, self.told = [*self.told, *self.links.collect()], []
        for number in sorted(self.living):
            if (code := self.processes[number].poll()) is not None:
                self.living.remove(number)
                told += [*self.links.drain(number), Ended(process=number, exit_code=code)]
        return told

    def say(self, process: int, word: Told) -> None:
        self.links.say(process, word)

    def signal(self, process: int, signum: int) -> None:
        self.processes[process].send_signal(signum)

    def look_into(self, processes: Collection[int]) -> dict[int, Sight]:
        return {number: Sight(state=explain_state(self.processes[number].pid)) for number in processes}

    def measure_load(self) -> Load:
        return Load(idle_cores=0.0, waiting=0.0)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(GUARD_S)
        self.links.close()
        self.news.close()
        for pidfd in self.pidfds:
            os.close(pidfd)

    def exit_codes(self, role: str) -> list[int | None]:
        """How the members of a role ended, in the order they were started."""
        pairs = zip(self.worlds, self.processes, strict=True)
        return [process.returncode for world, process in pairs if world.role == role]


@dataclass
class ActorEngine:
    """Opens a stage for actors who all follow one script, each in its own part."""

    script: str
    part: Any
    job: Job | None = None
    host: ActorHost | None = None

    def reserve(self, job: Job) -> list[ActorHost]:
        self.job = job
        self.host = ActorHost(self.script, self.part)
        return [self.host]
