"""The processes that do calls, on this host or on others: started, and told of when they end."""

from __future__ import annotations

import os
import selectors
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.comm.security import RunKey
from shoal.comm.tcp.addresses import listening_at
from shoal.errors import LaunchError, WorkerFailed
from shoal.launch.deaths import signal_name
from shoal.launch.engine import Host
from shoal.launch.engines import starter_of
from shoal.launch.local import LocalEngine
from shoal.launch.messages import Ended
from shoal.launch.remote.gathering import AgentEngine
from shoal.launch.worlds import plan_worlds
from shoal.sklearn.call_lines import CallDoor, NetworkDoor, UnixDoor
from shoal.sklearn.call_worker import SOCKET
from shoal.spec import Cluster, Job, World
from shoal.spec.vocabulary import Purpose

LOOK_EVERY_S = 1.0
"""How often hosts are looked at that say nothing: one that is gone does not."""
_MOST_STARTED = 1024
_NONE = 1e-9
"""The share of a host that is to have nobody, as long as there are others."""


class Staff:
    """Who is where. Whoever follows one that has ended is where there are fewest for its host's share."""

    def __init__(
        self,
        hosts: Sequence[Host],
        shares: Sequence[int],
        door: CallDoor,
        world: World,
        leave: Callable[[], None],
    ) -> None:
        """`shares`: how many each host is to have. `world`: what all are told of where to call."""
        self.door = door
        self._hosts = dict(enumerate(hosts))
        self._shares, self._world, self._leave = shares, world, leave
        self._at: dict[int, int] = {}
        """By process: its host."""

    @property
    def hosts(self) -> list[Host]:
        """Those that are there."""
        return list(self._hosts.values())

    def start(self, process: int) -> None:
        """One more."""
        held = Counter(self._at.values())
        number = min(self._hosts, key=lambda one: (held[one] + 1) / max(self._shares[one], _NONE))
        self._at[process] = number
        world = replace(self._world, global_rank=process, world_size=_MOST_STARTED, node=process, places=())
        self._hosts[number].start(process, world)

    def collect(self, selector: selectors.BaseSelector) -> Iterator[tuple[int, str]]:
        """Those that have ended since the last call, and how. WorkerFailed where no host is left."""
        for number, host in list(self._hosts.items()):
            try:
                for news in host.collect():
                    if isinstance(news, Ended):
                        del self._at[news.process]
                        code = news.exit_code
                        yield news.process, signal_name(-code) if code < 0 else f"exit status {code}"
            except LaunchError as error:
                selector.unregister(host)
                self._hosts.pop(number).close()
                if not self._hosts:
                    raise WorkerFailed(f"No host is left to do calls on. {error}") from None
                for process in [one for one, at in self._at.items() if at == number]:
                    del self._at[process]
                    yield process, "the loss of its host"

    def close(self) -> None:
        """End all of them."""
        self.door.close()
        for host in self._hosts.values():
            host.close()
        self._leave()


def make_staff(workers: int, threads: int | None, on: str) -> Staff:
    """With nobody in it."""
    job = Job(
        purpose=Purpose.SCRIPT,
        target=str(Path(__file__).with_name("call_worker.py")),
        strategy="data",
        cluster=Cluster(workers=workers, threads=threads, on=on),
    )
    if not job.cluster.is_remote:
        host = LocalEngine().open(job)
        door = UnixDoor(os.path.join(host.sockets.path, SOCKET), backlog=workers)
        return Staff([host], [workers], door, World(), leave=lambda: None)
    return _over_hosts(job)


def _over_hosts(job: Job) -> Staff:
    starter = starter_of(job.cluster, lambda text: None)
    engine, key = AgentEngine(starter), RunKey.create()
    hosts = engine.reserve(job)
    try:
        door = NetworkDoor(listening_at(starter.own_address(job.cluster.interface)), key)
    except BaseException:
        for host in hosts:
            host.close()
        engine.newcomers().close()
        raise
    numbers = Counter(world.host_number for world in plan_worlds(job, [host.facts for host in hosts]))
    shares = [numbers[number] for number in range(len(hosts))]
    world = World(secret=key.text, coordinator=door.address.removeprefix("tcp://"))
    return Staff(hosts, shares, door, world, leave=engine.newcomers().close)
