"""The worlds of a job: which processes it consists of, where each stands, and what to call them together."""

from __future__ import annotations

import secrets
import socket
from dataclasses import replace

from shoal.arena import supported
from shoal.errors import LaunchError, SpecError
from shoal.launch import load
from shoal.launch.sharing import spread
from shoal.observe.happenings import WorldFormed
from shoal.spec import Job, World
from shoal.spec.vocabulary import Purpose, Role
from shoal.spec.world import LOOPBACK

_SECRET_BYTES = 32
_ATTEMPT_BYTES = 8


def servers_of(job: Job) -> int:
    """How many servers a job starts with; those that have none have no coordinator either."""
    return job.conduct.servers if job.purpose in (Purpose.TRAIN, Purpose.SCRIPT) else 0


def plan_worlds(job: Job) -> list[World]:
    """One world for each process: coordinator and servers where there are any, workers, spares.

    Without servers `world_size` counts places, of which a worker may host several.
    """
    if job.purpose == Purpose.SCRIPT and job.cluster.spares:
        raise SpecError(
            f"Cluster: spares={job.cluster.spares} was set for a script, but only Shoal's own training can "
            "hand a worker's place to another process; leave spares at 0."
        )
    workers, spares, servers = job.cluster.places, job.cluster.spares, servers_of(job)
    is_alone = workers + spares + servers == 1
    ground = World(
        world_size=workers,
        local_size=workers,
        coordinator=_meeting_point(job),
        secret="" if is_alone else secrets.token_hex(_SECRET_BYTES),
        attempt=secrets.token_hex(_ATTEMPT_BYTES),
    )
    if not servers:
        hosted = spread(workers, load.starting_workers(job.cluster))
        ranks = [ground.hosting(places, generation=0) for places in hosted]
        return ranks + [member_world(ground, Role.SPARE, number) for number in range(spares)]
    roles = [(Role.COORDINATOR, 0)]
    roles += [(Role.SERVER, number) for number in range(servers)]
    roles += [(Role.WORKER, rank) for rank in range(workers)]
    return [member_world(ground, role, rank, node=node) for node, (role, rank) in enumerate(roles)]


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
    return _has_places(job)


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


def describe_world(job: Job, workers: int | None = None) -> WorldFormed:
    """The world that was formed: nobody should have to guess which."""
    cluster, servers = job.cluster, servers_of(job)
    workers = cluster.workers if workers is None else workers
    members = _count(workers, "worker")
    if cluster.is_elastic:
        members += f" ({cluster.min_workers} to {cluster.max_workers})"
    if servers:
        members += f", {_count(servers, 'server')} and a coordinator"
    elif cluster.spares:
        members += f" and {_count(cluster.spares, 'spare')}"
    threads = _count(cluster.threads_per_worker, "thread")
    return WorldFormed(
        workers=workers,
        places=cluster.places if cluster.is_elastic else None,
        spares=cluster.spares,
        servers=servers or None,
        slots=job.num_slots,
        strategy=job.strategy,
        threads=cluster.threads_per_worker,
        text=f"{members} on 1 host, {threads} each, loopback only",
    )


def _meeting_point(job: Job) -> str:
    """Nothing where nobody asked for a port: on one host Unix sockets do."""
    # A script's own torch.distributed meets at a port, and at nothing else.
    if job.cluster.port is None and job.purpose != Purpose.SCRIPT:
        return ""
    return f"{LOOPBACK}:{_choose_port(job.cluster.port)}"


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
