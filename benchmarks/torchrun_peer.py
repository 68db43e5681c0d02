"""The peer under kills: DDP under `torchrun --max-restarts`, with checkpoints written by hand.

A killed worker makes torchrun end the others and start all of them anew; they load the last checkpoint and take
the steps since then once more, which count once. `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` is needed: without it the
restarted workers read what the ended ones left in the shared store, and never take another step (torch 2.13).
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.measurement import Timeline
from benchmarks.ordeal import CALM_PART, Ordeal, throughput
from benchmarks.outages import Strike, find_outages
from benchmarks.tensorflow_peer import die_with, keep_to_loopback
from benchmarks.torchrun_script import BATCH
from shoal.errors import LaunchError
from shoal.roles.process.timeline import read_timeline

NAME, WORKERS = "torchrun, workers killed", 2
MAX_RESTARTS = 1000
START_TIMEOUT_S, LOOK_EVERY_S = 120.0, 0.05
TRAINS_S = 1.0
"""Workers are killed while they train: when the last step is not older than this."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What torchrun's workers did in the time they were given."""

    timeline: Timeline
    until: float
    strikes: tuple[Strike, ...]

    @property
    def samples_per_s(self) -> float:
        """New samples only, and all the time: also that in which it starts again."""
        return throughput(self.timeline, until=self.until)


def measure_torchrun(seconds: float, every_s: float) -> Ordeal:
    """For so long with a kill every so many seconds, and a part of that without, before and after."""
    before, stormy, after = train(seconds / CALM_PART), train(seconds, every_s), train(seconds / CALM_PART)
    return assess((before, after), stormy)


def assess(calm: Sequence[Session], stormy: Session) -> Ordeal:
    """The kills' session beside those without."""
    return Ordeal(
        name=NAME,
        calm_samples_per_s=throughput(*(session.timeline for session in calm)),
        samples_per_s=stormy.samples_per_s,
        faults=Counter(strike.kind for strike in stormy.strikes),
        outages=tuple(find_outages(stormy.timeline, stormy.strikes, BATCH * WORKERS)),
        seconds=stormy.timeline[-1][0] - stormy.timeline[0][0],
    )


def train(seconds: float, every_s: float | None = None) -> Session:
    """Train for so long from the first step on, with a kill every so many seconds."""
    strikes: list[Strike] = []
    chance = random.Random(1)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder, started(Path(folder)) as agent:
        timeline = Path(folder, "timeline")
        begin = _wait_for_first_step(timeline, agent)
        while (now := time.time()) < begin + seconds:
            if agent.poll() is not None:
                raise LaunchError(
                    f"bench: torchrun ended with status {agent.returncode} before its time was over."
                )
            is_due = every_s is not None and now >= begin + every_s * (len(strikes) + 1)
            if is_due and now - timeline.stat().st_mtime < TRAINS_S and (workers := _workers_of(agent)):
                strikes.append(Strike(time=time.time(), kind="kill"))
                chance.choice(workers).send_signal(signal.SIGKILL)
            time.sleep(LOOK_EVERY_S)
        return Session(timeline=read_timeline(timeline), until=now, strikes=tuple(strikes))


@contextlib.contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun and its workers, which end with the block."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--max-restarts={MAX_RESTARTS}"]
    command += [f"--nproc-per-node={WORKERS}", str(Path(__file__).with_name("torchrun_script.py")), str(folder)]
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agent = subprocess.Popen(
        command,
        env={**os.environ, **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=functools.partial(_prepare, os.getpid()),
    )
    try:
        yield agent
    finally:
        everyone = [agent, *_workers_of(agent)]
        for process in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        agent.wait()
        psutil.wait_procs(everyone[1:])


def _prepare(parent: int) -> None:
    """In the process that becomes torchrun: it ends with this one, and its store listens to nobody outside."""
    die_with(parent)
    keep_to_loopback()


def _workers_of(agent: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return psutil.Process(agent.pid).children()
    except psutil.NoSuchProcess:
        return []


def _wait_for_first_step(timeline: Path, agent: subprocess.Popen[bytes]) -> float:
    """When the first step was committed."""
    give_up = time.monotonic() + START_TIMEOUT_S
    while not timeline.exists() or not (marks := read_timeline(timeline)):
        if agent.poll() is not None or time.monotonic() > give_up:
            raise LaunchError(
                f"bench: torchrun took no step within {START_TIMEOUT_S:.0f} s; run it by hand to see why."
            )
        time.sleep(LOOK_EVERY_S)
    return marks[0][0]
