"""The hosts of a run, as its supervisor drives them: each process at its own, and who fails is lost alone."""

from __future__ import annotations

import selectors
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from shoal.errors import LaunchError
from shoal.launch.engine import CopyKeeper, Host
from shoal.launch.messages import HostCame, HostFailed, HostLost, Load, News, Said, Sight
from shoal.observe.happenings import CheckpointWritten
from shoal.spec import World
from shoal.spec.told import Told

_LOOK_EVERY_S = 1.0
"""How often hosts that are reached over a network are looked after, though nothing comes from them."""


class HostParty:
    """Several hosts, or one. `selector` is told of each, for as long as it is there."""

    def __init__(self, hosts: Sequence[Host], selector: selectors.BaseSelector) -> None:
        self._all = list(hosts)
        self._left = dict(enumerate(hosts))
        """Those that are there, by number."""
        self._host_of: dict[int, int] = {}
        """By process: the number of its host."""
        self._looked_at = time.monotonic()
        self._selector = selector
        for host in hosts:
            selector.register(host, selectors.EVENT_READ)

    @classmethod
    def of_adopted(
        cls, hosts: Mapping[int, Host], host_of: Mapping[int, int], selector: selectors.BaseSelector
    ) -> HostParty:
        """Hosts, by number, that were driven by another supervisor; and where it had processes started."""
        party = cls(list(hosts.values()), selector)
        party._left, party._host_of = dict(hosts), dict(host_of)
        return party

    def host_of(self, process: int) -> int:
        """The number of a process's host."""
        return self._host_of[process]

    def next_deadline(self) -> float | None:
        """When `collect` must be called at the latest: a host of several may fall silent."""
        return self._looked_at + _LOOK_EVERY_S if len(self._all) > 1 else None

    def start(self, process: int, world: World) -> HostFailed | HostLost | None:
        """Start a process at the host that its world names; what follows where that cannot be."""
        self._host_of[process] = world.host_number
        if (host := self._left.get(world.host_number)) is not None:
            try:
                host.start(process, world)
            except LaunchError as error:
                return self._lose(world.host_number, error)
        return None

    def add(self, host: Host) -> HostCame:
        """One more host has come."""
        self._left[len(self._all)] = host
        self._all.append(host)
        self._selector.register(host, selectors.EVENT_READ)
        return HostCame(host.facts)

    def let_go(self, number: int) -> HostLost | None:
        """Let a host leave."""
        if (host := self._left.pop(number, None)) is None:
            return None
        self._selector.unregister(host)
        host.close()
        return HostLost(number, f"Host {host.facts.name} was asked to leave.")

    def collect(self) -> Iterator[News | HostFailed | HostLost]:
        """What has happened at all of them."""
        self._looked_at = time.monotonic()
        for number, host in list(self._left.items()):
            try:
                for news in host.collect():
                    if isinstance(news, Said) and isinstance(news.word, CheckpointWritten):
                        self._have_copied(host, Path(news.word.path))
                    yield news
            except LaunchError as error:
                yield self._lose(number, error)

    def say(self, process: int, word: Told) -> None:
        """Say something to a process, if it and its host are there."""
        if (host := self._home(process)) is not None:
            host.say(process, word)

    def signal(self, process: int, signum: int) -> None:
        """Send a signal to a process, if it and its host are there."""
        if (host := self._home(process)) is not None:
            host.signal(process, signum)

    def look_into(self, processes: Collection[int]) -> dict[int, Sight]:
        """The stacks of these processes, as far as they can be had."""
        by_host: dict[int, list[int]] = defaultdict(list)
        for process in processes:
            by_host[self._host_of[process]].append(process)
        sights: dict[int, Sight] = {}
        for number, those in by_host.items():
            if number in self._left:
                sights |= self._left[number].look_into(those)
        return sights

    def measure_load(self) -> Load:
        """What else these hosts do, together."""
        loads = [host.measure_load() for host in self._left.values()]
        return Load(idle_cores=sum(load.idle_cores for load in loads), waiting=sum(load.waiting for load in loads))

    def close(self) -> None:
        """End whatever still runs on any of them."""
        for host in self._left.values():
            host.close()

    def _have_copied(self, maker: Host, checkpoint: Path) -> None:
        """Of what lies on the supervisor's disk alone, let another host have a copy, if any has a disk."""
        if isinstance(maker, CopyKeeper) and not maker.is_apart:
            keepers = [one for one in self._left.values() if isinstance(one, CopyKeeper) and one.is_apart]
            for keeper in keepers[:1]:
                keeper.keep_copy(checkpoint)

    def _home(self, process: int) -> Host | None:
        return self._left.get(self._host_of[process])

    def _lose(self, number: int, error: LaunchError) -> HostFailed | HostLost:
        """A host cannot be used any more. One that was alone takes the run with it."""
        if len(self._all) == 1:
            return HostFailed(str(error))
        host = self._left.pop(number)
        self._selector.unregister(host)
        host.close()
        return HostLost(number, str(error))
