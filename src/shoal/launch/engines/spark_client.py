"""The client of a Spark cluster: a process of its own for a master's address, a thread for a given session."""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections import Counter
from functools import partial
from typing import Any

from pyspark import InheritableThread
from pyspark.sql import SparkSession

from shoal.comm.channel import Channel
from shoal.comm.sealing import seal
from shoal.comm.security import RunKey
from shoal.errors import LaunchError
from shoal.launch.engines.client_side import ServingClient
from shoal.launch.engines.client_words import (
    AgentOver,
    AgentsWanted,
    AgentUnwanted,
    ClusterReached,
    ClusterWanted,
    RoomHeld,
    RoomLacking,
    RoomWanted,
)
from shoal.launch.engines.spark_tasks import AgentPlan, run_agent, show_executor
from shoal.spec.told import Told

_LOOK_EVERY_S = 0.2


class SparkClient(ServingClient):
    """One run's hold on the executors of a session; the session is its own unless one is given."""

    def __init__(self, channel: Channel, session: Any = None) -> None:
        super().__init__(channel)
        self._given, self._session = session is not None, session
        self._group = f"shoal-{secrets.token_hex(8)}"
        self._slots = 0
        self._publics: dict[str, str] = {}
        """By name of a host: what its key is to be sealed with."""
        self._job: threading.Thread | None = None
        self._failure = ""
        self._is_told = False

    @property
    def has_agents(self) -> bool:
        return self._job is not None and self._job.is_alive()

    def give_back(self) -> None:
        if self._session is None:
            return
        if self._job is not None:
            self._session.sparkContext.cancelJobGroup(self._group)
            self._job.join()
        if not self._given:
            self._session.stop()

    def take(self, word: Told) -> None:
        match word:
            case ClusterWanted():
                self._reach(word)
            case RoomWanted():
                self._hold(word)
            case AgentsWanted():
                self._start(word)
            case AgentUnwanted():
                pass  # Agents of this run end together; one that hears nobody ends by itself.

    def look(self) -> None:
        if self._failure and not self._is_told:
            self._is_told = True
            for name in self._publics:
                self.say(AgentOver(name=name, text=f"Host {name} could not join: {self._failure}"))

    def _reach(self, wanted: ClusterWanted) -> None:
        if not self._given:
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
            try:
                self._session = (
                    SparkSession.builder.master(wanted.address)
                    .appName("shoal")
                    .config("spark.cores.max", wanted.slots * wanted.cores)
                    .config("spark.task.cpus", wanted.cores)
                    .config("spark.ui.enabled", "false")
                    .getOrCreate()
                )
            except Exception as error:  # Of many kinds, from Java too.
                raise LaunchError(f"Spark at {wanted.address} cannot be used: {_first_line(error)}") from None
        self.say(ClusterReached(nodes=[]))

    def _hold(self, wanted: RoomWanted) -> None:
        needed, deadline = int(wanted.bundles[0]["slots"]), time.monotonic() + wanted.wait_s
        while (slots := self._count_slots()) < needed:
            if time.monotonic() > deadline:
                self.say(RoomLacking(free={"slots": slots}))
                return
            time.sleep(_LOOK_EVERY_S)
            self.take_all(0.0)
            if self.is_dismissed:
                return
        self._slots = slots
        shown = self._run_barrier()
        sizes = Counter(address for address, _ in shown)
        hosts = [address.rpartition(":")[0] for address in sizes]
        names = [address if hosts.count(host) > 1 else host for address, host in zip(sizes, hosts, strict=True)]
        publics = {address: public for address, public in shown if public}
        chosen = list(zip(names, sizes, strict=True))[:needed]
        self._publics = {name: publics[address] for name, address in chosen}
        cores = int(wanted.bundles[0]["cores"])
        self.say(RoomHeld(nodes=list(self._publics), cores=[sizes[address] * cores for _, address in chosen]))

    def _count_slots(self) -> int:
        """How many tasks run at a time."""
        context = self._session.sparkContext._jsc.sc()
        profile = context.resourceProfileManager().defaultResourceProfile()
        return int(context.maxNumConcurrentTasks(profile))

    def _run_barrier(self) -> list[tuple[str, str]]:
        """Every executor's address and public key."""
        tasks = self._session.sparkContext.parallelize(range(self._slots), self._slots)
        try:
            found: list[tuple[str, str]] = (
                tasks.barrier().mapPartitions(partial(show_executor, self._group)).collect()
            )
        except Exception as error:  # Of many kinds, from Java too.
            raise LaunchError(_why_unshown(error)) from None
        return sorted(found)

    def _start(self, wanted: AgentsWanted) -> None:
        key = RunKey.from_text(wanted.key)
        plans = {
            public: AgentPlan(
                name=name,
                address=wanted.address,
                ports=wanted.ports,
                cores=cores,
                sealed=seal(key, bytes.fromhex(public)),
            )
            for (name, public), cores in zip(self._publics.items(), wanted.cores, strict=True)
        }
        self._job = InheritableThread(
            target=self._run_agents, args=(plans,), session=self._session, name="shoal-spark-job", daemon=True
        )
        self._job.start()

    def _run_agents(self, plans: dict[str, AgentPlan]) -> None:
        context = self._session.sparkContext
        context.setJobGroup(self._group, "agents of a run of Shoal", interruptOnCancel=True)
        tasks = context.parallelize(range(self._slots), self._slots)
        try:
            said = tasks.mapPartitions(partial(run_agent, self._group, plans)).collect()
            self._failure = next(filter(None, said), "its task has ended.")
        except Exception as error:
            self._failure = _first_line(error)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _why_unshown(error: Exception) -> str:
    for line in str(error).splitlines():
        if "No module named" in line:
            return f"Spark's executors cannot run Shoal ({line.strip()}); install it there, for PYSPARK_PYTHON."
    return f"Spark could not run the tasks of a barrier: {_first_line(error)}"


if __name__ == "__main__":
    SparkClient(Channel.from_fd(int(sys.argv[1]))).serve()
