"""Starts the workers of an elastic script, and others for those that die; says which of them are a world."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import Interrupted, LaunchError, SpecError, WorkerFailed
from shoal.horovod.elastic.board import MOST_NODES, Board, NamedWorld
from shoal.launch.deaths import signal_name
from shoal.launch.echo import Echo
from shoal.launch.local import LocalEngine, LocalHost
from shoal.launch.messages import Ended
from shoal.launch.owner import ZygoteProcess
from shoal.spec import Cluster, Job, World
from shoal.spec.vocabulary import Purpose

_LOOK_EVERY_S = 0.02
_DISCOVER_EVERY_S = 1.0
_KEPT_MEMORIES = 2
"""Segments of this many worlds stay open: a worker may be about to look its own up."""


@dataclass(frozen=True, kw_only=True)
class ElasticLimits:
    """How many workers there are, and how often the world may change."""

    workers: int
    """To begin with, where no script says how many."""
    least: int = 1
    most: int | None = None
    resets: int | None = None
    """None: as often as need be."""
    discovery_script: str | None = None
    """Prints lines like `localhost:2`; the slots of all of them are places on this host."""

    def __post_init__(self) -> None:
        most = self.workers if self.most is None else self.most
        if not 1 <= self.least <= self.workers <= most:
            raise SpecError(
                f"An elastic run has 1 or more workers at least, found {self.least} at least, {self.workers} to "
                f"begin with, and {most} at most; let them be in this order."
            )

    def wanted(self) -> int:
        """How many workers there should be now."""
        if self.discovery_script is None:
            return self.workers
        return min(self._found_slots(self.discovery_script), self.most or self.workers)

    def _found_slots(self, script: str) -> int:
        try:
            answer = subprocess.run([os.path.abspath(script)], capture_output=True, text=True)
        except OSError as error:
            raise LaunchError(
                f"The host discovery script {script!r} cannot be run ({error.strerror}); it should be a file that "
                "is there and executable, and that begins with a line like #!/bin/sh."
            ) from None
        lines = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
        slots = [line.partition(":")[2] or "1" for line in lines]
        if answer.returncode or not all(text.isdecimal() for text in slots):
            raise LaunchError(
                f"The host discovery script {script!r} should print lines like localhost:2, found "
                f"{answer.stdout!r} and exit status {answer.returncode}; let it print one line for each host."
            )
        return sum(map(int, slots))


class ElasticDriver:
    """One run of a script."""

    def __init__(self, host: LocalHost, limits: ElasticLimits, tell: Callable[[str], None]) -> None:
        self._host, self._limits, self._tell = host, limits, tell
        self._board = Board(host.arena_fd)
        self._living: dict[int, int] = {}
        """Workers, and how often each was given a world."""
        self._world = NamedWorld(generation=0, nodes=(), memory="")
        self._memories: list[int] = []
        self._started = self._finished = self._resets = 0
        self._wanted = limits.wanted()
        self._looked_at = time.monotonic()

    def run(self) -> None:
        """Until all have ended well; raises where one failed, or too many died."""
        try:
            self._start(self._wanted)
            while self._living:
                select.select([self._host], [], [], _LOOK_EVERY_S)
                for news in self._host.collect():
                    if isinstance(news, Ended):
                        self._take_end(news)
                self._discover()
                self._name_world()
        finally:
            for fd in self._memories:
                os.close(fd)

    def _start(self, count: int) -> None:
        for _ in range(count):
            node = self._started
            if node >= MOST_NODES:
                raise LaunchError(f"{node} workers were started for this run, and no more can be; start it again.")
            self._started += 1
            self._living[node] = 0
            # Which of how many it is, each world says anew; until then a number of its own tells it from others.
            self._host.start(node, World(global_rank=node, world_size=MOST_NODES, node=node))

    def _take_end(self, news: Ended) -> None:
        node, code = news.process, news.exit_code
        del self._living[node]
        if code == 0:
            self._finished += 1
            return
        if code > 0:
            raise WorkerFailed(f"Worker {node} failed with exit status {code}.", global_rank=node, exit_code=code)
        self._resets += 1
        self._tell(f"Worker {node} was ended by {signal_name(-code)}; the others go on in another world.")
        if self._limits.resets is not None and self._resets > self._limits.resets:
            raise WorkerFailed(
                f"Workers have died {self._resets} times, and {self._limits.resets} resets were allowed; see what "
                "they said last, or allow more with --reset-limit.",
                exit_code=128 - code,
            )
        if node in self._world.nodes:
            self._board.doom(self._world.generation)
        if not self._finished:
            self._start(max(0, self._wanted - len(self._living)))

    def _discover(self) -> None:
        """Whether there is room for more workers by now."""
        now = time.monotonic()
        if self._limits.discovery_script is None or now < self._looked_at + _DISCOVER_EVERY_S or self._finished:
            return
        self._looked_at = now
        wanted = max(self._limits.wanted(), self._limits.least)
        if wanted > len(self._living):
            self._tell(f"There is room for {wanted} workers, and there are {len(self._living)}; starting more.")
            self._wanted = wanted
            self._start(wanted - len(self._living))
            self._board.wish()

    def _name_world(self) -> None:
        """Once everybody who lives has asked for one, and there are enough of them."""
        waiting = [node for node, given in self._living.items() if self._board.asked(node) > given]
        if not waiting or len(waiting) < max(len(self._living), min(self._limits.least, self._wanted)):
            return
        self._memories.append(os.memfd_create("shoal-world"))
        while len(self._memories) > _KEPT_MEMORIES:
            os.close(self._memories.pop(0))
        for node in waiting:
            self._living[node] = self._board.asked(node)
        self._world = NamedWorld(
            generation=self._world.generation + 1,
            nodes=tuple(sorted(waiting)),
            memory=f"{os.getpid()}:{self._memories[-1]}",
        )
        self._board.name(self._world)
        self._tell(f"A world of {len(waiting)}: workers {', '.join(map(str, self._world.nodes))}.")


def run_elastic(
    script: str | Path,
    arguments: Sequence[str],
    *,
    limits: ElasticLimits,
    options: dict[str, object],
    threads: int | None = None,
    zygote: ZygoteProcess | None = None,
    tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> None:
    """Run a script in worlds that change, its output live on the terminal."""
    if not Path(script).is_file():
        raise SpecError(f"There is no script {str(script)!r} in {Path.cwd()}; check the path.")
    job = Job(
        purpose=Purpose.SCRIPT,
        target=str(script),
        strategy="data",
        cluster=Cluster(workers=limits.workers, threads=threads),
        options={"argv": list(arguments), **options},
    )
    with Echo(sys.stdout.buffer, alone=False) as echo:
        host = LocalEngine(zygote, echo=echo).open(job)
        # As Ctrl-C does, so that nobody is left behind.
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            ElasticDriver(host, limits, tell).run()
        except KeyboardInterrupt:
            raise Interrupted("Interrupted; all workers have ended.") from None
        finally:
            signal.signal(signal.SIGTERM, before)
            host.close()
