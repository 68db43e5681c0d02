"""Seating: which host has which worker and server of a run. Who has more room gets more.

Workers have neighbouring ranks on each host, so that sums which run in the order of ranks pass each host once.
Servers are spread as far as they go, so that a copy of what one holds lies on another host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.errors import LaunchError
from shoal.layout.placement_table import binary_size
from shoal.spec.host_facts import HostFacts
from shoal.spec.vocabulary import Role

_FIRST = 0


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Whom a run wants seated, and what each takes."""

    workers: int
    servers: int = 0
    on_gpus: bool = False
    """Each worker has a GPU of its own."""
    memory_bytes: int | None = None
    """What each worker may use, where the user said so."""


@dataclass(frozen=True, kw_only=True)
class Seating:
    """By rank, or by a server's number: the number of its host."""

    workers: tuple[int, ...]
    servers: tuple[int, ...] = ()
    coordinator: int = _FIRST

    def sizes(self, hosts: int) -> tuple[int, ...]:
        """How many workers each host has."""
        return tuple(self.workers.count(host) for host in range(hosts))


def seat_all(hosts: Sequence[HostFacts], demand: Demand) -> Seating:
    """A host for each worker and server that a run begins with; LaunchError where there is not enough room."""
    hosts = _unless_crowded(hosts, demand)
    rooms = [_most_workers(host, demand) for host in hosts]
    total = sum(room for room in rooms if room is not None)
    if None not in rooms and total < demand.workers:
        raise LaunchError(_too_few(hosts, demand, total))
    shares = _by_capacity([_capacity(host, demand) for host in hosts], rooms, demand.workers)
    workers = tuple(host for host, share in enumerate(shares) for _ in range(share))
    return Seating(workers=workers, servers=_spread(hosts, demand.servers))


def seat_one(hosts: Mapping[int, HostFacts], held: Mapping[int, int], role: Role, demand: Demand) -> int:
    """A host for one more process, of those that are left; `held`: how many of its role each has."""
    free = {number: host for number, host in hosts.items() if _has_room(host, held.get(number, 0), role, demand)}
    # Better crowded than not at all: what a lost host did must be done by those that are left.
    candidates = free or hosts
    return min(
        candidates,
        key=lambda number: ((held.get(number, 0) + 1) / _capacity_for(candidates[number], role, demand), number),
    )


def explain_seating(hosts: Sequence[HostFacts], seating: Seating) -> list[str]:
    """A line for each host: what it is, and who is there."""
    lines = []
    for number, host in enumerate(hosts):
        ranks = [rank for rank, at in enumerate(seating.workers) if at == number]
        who = [f"worker{'s' * (len(ranks) > 1)} {_span(ranks)}"] if ranks else []
        held = [server for server, at in enumerate(seating.servers) if at == number]
        who += [f"server{'s' * (len(held) > 1)} {', '.join(map(str, held))}"] if held else []
        who += ["the coordinator"] if seating.servers and seating.coordinator == number else []
        gpus = f", {host.gpus} GPU{'s' * (host.gpus > 1)}" if host.gpus else ""
        cores = f"{host.cores} core{'s' * (host.cores > 1)}"
        lines.append(f"{host.name} ({host.address}, {cores}{gpus}): {', '.join(who) or 'nobody'}")
    return lines


def _capacity(host: HostFacts, demand: Demand) -> int:
    """What workers are dealt out by."""
    return host.gpus if demand.on_gpus else host.cores


def _capacity_for(host: HostFacts, role: Role, demand: Demand) -> int:
    return max(1, _capacity(host, demand) if role in (Role.WORKER, Role.SPARE) else host.cores)


def _most_workers(host: HostFacts, demand: Demand) -> int | None:
    """As many as a host has GPUs or memory for, or was given; None where nothing limits them."""
    limits = [host.gpus] if demand.on_gpus else []
    limits += [] if host.most_workers is None else [host.most_workers]
    if demand.memory_bytes is not None and host.memory_bytes:
        limits.append(host.memory_bytes // demand.memory_bytes)
    return min(limits, default=None)


def _unless_crowded(hosts: Sequence[HostFacts], demand: Demand) -> Sequence[HostFacts]:
    """Those who are left when a host was lost have to do its work, too: what each was given holds no more then."""
    given = [host.most_workers for host in hosts if host.most_workers is not None]
    if len(given) < len(hosts) or sum(given) >= demand.workers:
        return hosts
    return [replace(host, most_workers=None) for host in hosts]


def _has_room(host: HostFacts, held: int, role: Role, demand: Demand) -> bool:
    most = _most_workers(host, demand) if role in (Role.WORKER, Role.SPARE) else None
    return most is None or held < most


def _by_capacity(capacities: Sequence[int], rooms: Sequence[int | None], count: int) -> list[int]:
    """So many among hosts, each to the one that is least crowded with it; the first of equals."""
    shares = [0] * len(capacities)
    for _ in range(count):
        free = [host for host, room in enumerate(rooms) if room is None or shares[host] < room]
        host = min(free, key=lambda host: ((shares[host] + 1) / max(1, capacities[host]), host))
        shares[host] += 1
    return shares


def _spread(hosts: Sequence[HostFacts], servers: int) -> tuple[int, ...]:
    """A host for each server. In rounds over the hosts: neighbours are apart, and no host has two before all have
    one, because the loss of a host should cost few of them."""
    order = sorted(range(len(hosts)), key=lambda host: (-hosts[host].cores, host))
    return tuple(order[number % len(order)] for number in range(servers))


def _span(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _too_few(hosts: Sequence[HostFacts], demand: Demand, room: int) -> str:
    size = binary_size(demand.memory_bytes or 0)
    what = "GPUs" if demand.on_gpus else f"memory ({size} for each)"
    names = ", ".join(host.name for host in hosts)
    return (
        f"{demand.workers} workers were asked for, but {names} have {what} for {room}; use fewer workers, or more "
        "hosts."
    )
