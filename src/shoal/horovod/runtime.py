"""This process among the others: `init` and what it makes possible. There is one per process, as in Horovod."""

from __future__ import annotations

import atexit
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from shoal.arena.malloc import keep_freed_memory
from shoal.horovod.assembly import Assembly, Circle, HostAssembly
from shoal.horovod.common.exceptions import HorovodInternalError
from shoal.horovod.elastic.place import elastic_world
from shoal.horovod.engine import Outstanding, SetEngine, StallLimits, Watch
from shoal.horovod.negotiation import Decision
from shoal.horovod.operations import Submission
from shoal.horovod.over_hosts import HostsAssembly, Meet
from shoal.horovod.requests import Act, TensorRequest
from shoal.horovod.timeline import TensorTimeline
from shoal.roles.process.joining import Fellows, orphan_watch
from shoal.roles.process.station import current_station
from shoal.spec import Conduct, World
from shoal.spec.conduct import even_fills
from shoal.strategies.base import Company, Setting
from shoal.strategies.groups.opening import open_group

_TIMELINE, _WARN, _END = (
    f"HOROVOD_{name}" for name in ("TIMELINE", "STALL_CHECK_TIME_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS")
)


class ProcessSet:
    """Some of the processes, by their ranks, who do things together without the others."""

    def __init__(self, ranks: Iterable[int] | None = None) -> None:
        self.ranks = None if ranks is None else sorted(set(ranks))
        """None: all."""
        self.process_set_id: int | None = 0 if ranks is None else None
        """None: it was not added yet, or has been removed."""

    def size(self) -> int:
        """How many processes there are in it."""
        return len(self._engine().group.ranks) if self.included() else len(self.ranks or ())

    def rank(self) -> int:
        """This process's number in it; -1 where it is not in it."""
        return self._engine().group.index if self.included() else -1

    def included(self) -> bool:
        """Whether this process is in it."""
        return self.ranks is None or current().rank in self.ranks

    def _engine(self) -> SetEngine:
        return current().engine_of(self)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet()


@dataclass(eq=False)
class Runtime:
    """What `init` made."""

    world: World
    assembly: Assembly
    watch: Watch
    close: Callable[[], None]
    """Leave whoever let this process meet the others."""
    timeline: TensorTimeline = field(default_factory=TensorTimeline)
    engines: dict[int, SetEngine] = field(default_factory=dict)
    """By process set; 0 is that of all."""
    sets: dict[int, ProcessSet] = field(default_factory=dict)
    num_sets: int = 0
    """That were ever added, which is the same everywhere."""
    unnamed: Counter[tuple[Act, int | None]] = field(default_factory=Counter)
    """Calls without a name, by what they are, in each process set: all who make the same calls count alike, also
    one that has come to this world only now."""

    @property
    def rank(self) -> int:
        """Among all."""
        return self.world.global_rank

    def hosts_alike(self) -> list[bool]:
        """By host: whether it has a process with this one's local rank."""
        return [size > self.world.local_rank for size in self.world.hosts or (self.world.world_size,)]

    def open(self) -> None:
        """Begin to negotiate."""
        if self.rank == 0 and os.environ.get(_TIMELINE):
            self.timeline.start(os.environ[_TIMELINE])
        self.engines[0] = self._engine(self.assembly.all())

    def engine_of(self, process_set: ProcessSet) -> SetEngine:
        """Refuses a set that is not there, or that this process is not in."""
        number = process_set.process_set_id
        if number is None:
            raise ValueError(f"{process_set!r} is not known; add it with add_process_set in all processes first.")
        if number not in self.engines:
            raise ValueError(f"Rank {self.rank} is not in {process_set!r}; ask there only in processes of it.")
        return self.engines[number]

    def count_unnamed(self, act: Act, process_set: ProcessSet) -> int:
        """The number of this call among those without a name."""
        key = act, process_set.process_set_id
        self.unnamed[key] += 1
        return self.unnamed[key]

    def arrange(self, decision: Decision) -> None:
        """In all processes together: make a process set, or end one."""
        request = decision.request
        if request.act is Act.REMOVE_SET:
            number = request.root
            self.sets.pop(number).process_set_id = None
            engine = self.engines.pop(number, None)
            if engine is not None and engine is not self.engines[0]:
                engine.stop()
            return
        self.num_sets += 1
        if len(request.ranks) == self.world.world_size:
            self.engines[self.num_sets] = self.engines[0]
            return
        if (circle := self.assembly.part(request.ranks)) is not None:
            self.engines[self.num_sets] = self._engine(circle)

    def _engine(self, circle: Circle) -> SetEngine:
        limits = StallLimits(warn_s=_seconds(_WARN, 60.0), end_s=_seconds(_END, 0.0))
        return SetEngine(*circle, self.watch, limits, self.timeline, self.arrange)

    def shut_down(self) -> None:
        """Leave the others."""
        for engine in set(self.engines.values()):
            engine.stop()
        self.timeline.stop()
        self.assembly.close()
        self.close()
        for process_set in self.sets.values():
            process_set.process_set_id = None


_runtimes: list[Runtime] = []
"""That of this process, while it has one: Horovod's functions are handed nothing."""


def current() -> Runtime:
    """The one that `init` made."""
    if not _runtimes:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _runtimes[-1]


def init(
    comm: object = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    *,
    world: World | None = None,
    meet: Meet | None = None,
) -> None:
    """Meet the other processes that `shoal run` or torchrun started; a process alone is a world of one.

    `comm` must be None, for there is no MPI here. `world` takes the place of what the environment says;
    `meet` is how its processes find each other where they are on several hosts.
    """
    if comm:
        raise ValueError("init(comm=…) takes MPI communicators or ranks, which Shoal has none of; leave it out.")
    if _runtimes:
        return
    keep_freed_memory()
    _runtimes.append(_opened(world, meet))
    for process_set in process_sets if not isinstance(process_sets, str | None) else ():
        add_process_set(process_set)
    atexit.register(shutdown)


def _opened(world: World | None, meet: Meet | None) -> Runtime:
    """In an elastic run others may die while all of a world come together; then there is another one."""
    while True:
        try:
            runtime = _meet(world, meet)
            runtime.open()
            return runtime
        except HorovodInternalError:
            if elastic_world() is None:
                raise


def _meet(world: World | None, meet: Meet | None) -> Runtime:
    if (place := elastic_world()) is not None:
        watch = Watch(place.look)
        found, group = place.enter(watch.look)
        return Runtime(world=found, assembly=HostAssembly(group), watch=watch, close=place.leave)
    station = current_station()
    if world is None and station is not None and station.world.is_spread:
        world, meet = station.world, station.meet
    if world is not None and meet is not None:
        return _meet_over_hosts(world, meet)
    fellows = Fellows(world or World.from_environment(), orphan_watch())
    found = fellows.gather()
    watch = Watch(orphan_watch())
    conduct = Conduct(fills=even_fills(found.world_size, found.world_size))
    setting = Setting(world=found, conduct=conduct, company=Company(on_idle=watch.look))
    assembly = HostAssembly(open_group("auto", setting))
    return Runtime(world=found, assembly=assembly, watch=watch, close=fellows.close)


def _meet_over_hosts(world: World, meet: Meet) -> Runtime:
    watch = Watch(orphan_watch())
    here = replace(world, world_size=world.local_size, global_rank=world.local_rank, places=())
    fellows = Fellows(here, watch.look)
    found = fellows.gather()
    world = replace(world, arena_fd=found.arena_fd, sockets=found.sockets)
    assembly = HostsAssembly(world, meet, watch.look)
    return Runtime(world=world, assembly=assembly, watch=watch, close=fellows.close)


def shutdown() -> None:
    """Leave the others; `init` may be called again."""
    atexit.unregister(shutdown)
    while _runtimes:
        _runtimes.pop().shut_down()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not."""
    return bool(_runtimes)


def submit(
    request: TensorRequest, tensors: Sequence[torch.Tensor], process_set: ProcessSet
) -> tuple[SetEngine, Outstanding]:
    """Ask for something in a process set."""
    engine = current().engine_of(process_set)
    return engine, engine.submit(Submission(request=request, tensors=list(tensors)))


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a set of ranks. All processes call this, also those that are not in it, in the same order."""
    runtime = current()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = added.ranks
    if ranks is None or not ranks or not set(ranks) <= set(range(runtime.world.world_size)):
        raise ValueError(f"A process set has ranks below {runtime.world.world_size}, found {ranks}.")
    if any(other.ranks == ranks for other in runtime.sets.values()):
        raise ValueError(f"A process set with the ranks {ranks} exists already; use that one.")
    # By ranks: whoever asks for other ones waits for them, and is told so.
    _together(TensorRequest(name=f"process_set.{ranks}", act=Act.ADD_SET, ranks=tuple(ranks)))
    added.process_set_id = runtime.num_sets
    runtime.sets[runtime.num_sets] = added
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove it in all processes; False where it is not there, or is that of all."""
    number = process_set.process_set_id
    if number is None or process_set is global_process_set:
        return False
    _together(TensorRequest(name=f"process_set.remove.{number}", act=Act.REMOVE_SET, root=number))
    return True


def _together(request: TensorRequest) -> None:
    engine, asked = submit(request, (), global_process_set)
    engine.wait(asked)


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise ValueError(f"{variable} is a number of seconds, found {text!r}.") from None
