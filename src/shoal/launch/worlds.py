"""The worlds of a job: which processes it consists of, where each stands, and what to call them together."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import replace

from shoal.arena import supported
from shoal.errors import LaunchError, SpecError
from shoal.launch import load
from shoal.launch.sharing import spread
from shoal.layout import Demand, Seating, explain_seating, seat_all
from shoal.observe.happenings import WorldFormed
from shoal.spec import Job, World
from shoal.spec.host_facts import HostFacts
from shoal.spec.vocabulary import Purpose, Role
from shoal.spec.world import LOOPBACK, bracketed

_SECRET_BYTES = 32
_ATTEMPT_BYTES = 8


def servers_of(job: Job) -> int:
    """How many servers a job starts with; those that have none have no coordinator either."""
    return job.conduct.servers if job.purpose in (Purpose.TRAIN, Purpose.SCRIPT) else 0


def workers_on(job: Job, hosts: int) -> int:
    """How many workers a run has on so many hosts: where these come and go, each host's share of them."""
    cluster, servers = job.cluster, servers_of(job)
    if cluster.hosts and (job.conduct.takes_hosts or not servers):
        return min(cluster.workers, cluster.workers_per_host * hosts)
    # With servers a run begins with its least number of workers; without, all places are filled at once.
    return cluster.workers if servers else cluster.places


def demand_of(job: Job, hosts: int = 0) -> Demand:
    """Whom the hosts of a run have to hold; `hosts`: how many there are, where it begins."""
    cluster = job.cluster
    return Demand(
        workers=workers_on(job, hosts) if cluster.hosts and hosts else cluster.places,
        servers=servers_of(job),
        on_gpus=cluster.device == "cuda",
        memory_bytes=cluster.memory_bytes,
    )


def threads_on(job: Job, hosts: Sequence[HostFacts]) -> int:
    """Threads of each process: the same on all hosts, so that sums have the same bits wherever they are made."""
    cluster = job.cluster
    if not hosts or cluster.threads is not None or os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return cluster.threads_per_worker
    is_one = len(hosts) == 1 and not cluster.hosts
    sizes = (cluster.places,) if is_one else seat_all(hosts, demand_of(job, len(hosts))).sizes(len(hosts))
    return max(1, min(host.cores // size for host, size in zip(hosts, sizes, strict=True) if size))


def explain_hosts(job: Job, hosts: Sequence[HostFacts]) -> list[str]:
    """A line for each host: who would be there."""
    return explain_seating(hosts, seat_all(hosts, demand_of(job, len(hosts)))) if hosts else []


def plan_worlds(job: Job, hosts: Sequence[HostFacts] = ()) -> list[World]:
    """One world for each process: coordinator and servers where there are any, workers, spares.

    Without servers `world_size` counts places, of which a worker may host several. `hosts`: where they go, if that
    is not this host.
    """
    worlds = _plan(job, hosts)
    if not _spans_hosts(job, hosts):
        return worlds
    seating = seat_all(hosts, demand_of(job, len(hosts)))
    sizes = seating.sizes(max(2, len(hosts)))  # One that others may come to is the first of several.
    doors = tuple((meeting_point(host, host.train_port), meeting_point(host, host.test_port)) for host in hosts)
    numbers = [_host_of(world, seating, len(hosts)) for world in worlds]
    if job.purpose == Purpose.SCRIPT:  # whose own torch.distributed is served by the process of rank 0
        point = meeting_point(hosts[numbers[0]], job.cluster.port)
        worlds = [replace(world, coordinator=point) for world in worlds]
    return [
        replace(world, hosts=sizes, doors=doors).at(number, hosts[number].address)
        for world, number in zip(worlds, numbers, strict=True)
    ]


def _spans_hosts(job: Job, hosts: Sequence[HostFacts]) -> bool:
    return len(hosts) > 1 or bool(hosts and job.cluster.hosts)


def _host_of(world: World, seating: Seating, hosts: int) -> int:
    match world.role:
        case Role.WORKER:
            return seating.workers[world.member]
        case Role.SERVER:
            return seating.servers[world.global_rank]
        case Role.STANDBY:
            return (seating.coordinator + 1) % hosts  # A lost host must not take both.
    return seating.coordinator


def _plan(job: Job, hosts: Sequence[HostFacts]) -> list[World]:
    if job.purpose == Purpose.SCRIPT and job.cluster.spares:
        raise SpecError(
            f"Cluster: spares={job.cluster.spares} was set for a script, but only Shoal's own training can "
            "hand a worker's place to another process; leave spares at 0."
        )
    spares, servers = job.cluster.spares, servers_of(job)
    workers = workers_on(job, len(hosts)) if servers else job.cluster.places
    is_alone = workers + spares + servers == 1
    ground = World(
        world_size=workers,
        local_size=workers,
        coordinator=_meeting_point(job, hosts),
        secret="" if is_alone else secrets.token_hex(_SECRET_BYTES),
        attempt=secrets.token_hex(_ATTEMPT_BYTES),
        ports=job.cluster.ports,
        trusted_network=job.cluster.trusted_network,
        link=job.cluster.link,
    )
    if not servers:
        count = workers_on(job, len(hosts)) if job.cluster.hosts else load.starting_workers(job.cluster)
        hosted = spread(workers, count)
        if job.cluster.hosts and count < workers:
            ground = replace(ground, deal=tuple(hosted))
        ranks = [ground.hosting(places, generation=0) for places in hosted]
        return ranks + [member_world(ground, Role.SPARE, number) for number in range(spares)]
    roles = [(Role.COORDINATOR, 0)]
    roles += [(Role.SERVER, number) for number in range(servers)]
    roles += [(Role.WORKER, rank) for rank in range(workers)]
    members = [member_world(ground, role, rank, node=node) for node, (role, rank) in enumerate(roles)]
    return members + [member_world(ground, Role.STANDBY, number) for number in range(job.conduct.standbys)]


def member_world(other: World, role: Role, number: int, *, node: int = 0, generation: int = 0) -> World:
    """Where one more process stands, beside `other`: a worker by its rank, any other by its number."""
    rank = number if role == Role.WORKER else 0
    # A run may be given more workers than it began with.
    size = max(other.world_size, rank + 1)
    return replace(
        other,
        role=role,
        global_rank=number,
        local_rank=rank,
        world_size=size,
        local_size=size,
        node=node,
        generation=generation,
        places=(),
    )


def can_move(job: Job) -> bool:
    """Whether one process can do the work of several: all is in shared memory."""
    return _has_places(job) and job.conduct.hosts_several


def can_replace(job: Job) -> bool:
    """Whether another process can go on where one died in the middle of a step."""
    cluster = job.cluster
    # A process that is alone without need trains in memory of its own.
    return _has_places(job) and job.conduct.has_journal and cluster.places + cluster.spares > 1


def advice_after_loss(job: Job) -> str:
    """What would have helped when a worker was lost that nobody can replace; empty where nothing would."""
    if job.purpose != Purpose.TRAIN or job.restarts or not job.replaces:
        return ""
    is_gone = job.conduct.is_cut and not job.conduct.has_copies
    why = "nobody else has its part of the model" if is_gone else "nobody can take its place"
    flags = [] if job.checkpoint != "none" else ["--checkpoint every=200"]
    flags += [] if job.on_failure == "auto" else ["--on-failure restart"]
    return f" With strategy={job.strategy} {why}; with {' and '.join(flags)} the run goes on by itself."


def _has_places(job: Job) -> bool:
    return job.purpose == Purpose.TRAIN and job.conduct.has_places and supported()


def describe_world(job: Job, workers: int | None = None, hosts: Sequence[HostFacts] = ()) -> WorldFormed:
    """The world that was formed: nobody should have to guess which."""
    cluster, servers = job.cluster, servers_of(job)
    workers = cluster.workers if workers is None else workers
    members = _count(workers, "worker")
    if cluster.is_elastic:
        members += f" ({cluster.min_workers} to {cluster.max_workers})"
    if servers:
        members += f", {_count(servers, 'server')} and a coordinator"
        members += " with a standby" if job.conduct.standbys else ""
    elif cluster.spares:
        members += f" and {_count(cluster.spares, 'spare')}"
    num_threads = threads_on(job, hosts)
    threads = _count(num_threads, "thread")
    where, reach = "1 host", "loopback only"
    if _spans_hosts(job, hosts):
        limits = f", of {cluster.min_hosts} to {cluster.max_hosts}" if cluster.hosts else ""
        where = f"{_count(len(hosts), 'host')} ({', '.join(host.name for host in hosts)}{limits})"
        reach = "in the clear between them" if cluster.trusted_network else "encrypted between them"
        reach += f", as over {cluster.link}" if cluster.link else ""
    return WorldFormed(
        workers=workers,
        hosts=max(1, len(hosts)),
        places=cluster.places if cluster.is_elastic else None,
        spares=cluster.spares,
        servers=servers or None,
        slots=job.num_slots,
        strategy=job.strategy,
        threads=num_threads,
        text=f"{members} on {where}, {threads} each, {reach}",
    )


def _meeting_point(job: Job, hosts: Sequence[HostFacts]) -> str:
    """Nothing where nobody asked for a port: on one host Unix sockets do. Of several, the first has one free."""
    if _spans_hosts(job, hosts):
        return meeting_point(hosts[0], job.cluster.port) if servers_of(job) else ""
    # A script's own torch.distributed meets at a port, and at nothing else.
    if job.cluster.port is None and job.purpose != Purpose.SCRIPT:
        return ""
    return f"{LOOPBACK}:{_choose_port(job.cluster.port)}"


def meeting_point(host: HostFacts, port: int | None = None) -> str:
    """Where a coordinator on this host listens."""
    return f"{bracketed(host.address)}:{port or host.port}"


def _choose_port(fixed: int | None) -> int:
    """A port that is free on loopback now; the fixed one where the user set it."""
    with socket.socket() as probe:
        # As servers do: a port that only waits out its last connection is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, fixed or 0))
        except OSError as error:
            raise LaunchError(
                f"Cluster: port {fixed} cannot be used on {LOOPBACK} ({error.strerror}); end the program "
                "that holds it, choose another port, or set none to get a free one."
            ) from None
        return probe.getsockname()[1]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
