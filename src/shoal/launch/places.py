"""The places of a job: which processes it consists of, and what to call the world they form."""

from __future__ import annotations

import secrets
import socket
from dataclasses import replace
from typing import Any

from shoal.errors import LaunchError, SpecError
from shoal.spec import Job, ParameterServer, World
from shoal.spec.world import LOOPBACK

_SECRET_BYTES = 32


def servers_of(job: Job) -> int:
    """How many servers a job starts with; those that have none have no coordinator either."""
    spec = job.spec
    return spec.num_servers if job.purpose == "train" and isinstance(spec, ParameterServer) else 0


def plan_places(job: Job) -> list[World]:
    """One world for each process: coordinator and servers where there are any, workers, spares."""
    if job.purpose == "script" and job.cluster.spares:
        raise SpecError(
            f"Cluster: spares={job.cluster.spares} was set for a script, but only Shoal's own training can "
            "hand a worker's place to another process; leave spares at 0."
        )
    workers, spares, servers = job.cluster.workers, job.cluster.spares, servers_of(job)
    is_alone = workers + spares + servers == 1
    ground = World(
        world_size=workers,
        local_size=workers,
        coordinator=f"{LOOPBACK}:{_choose_port(job.cluster.port)}",
        secret="" if is_alone else secrets.token_hex(_SECRET_BYTES),
    )
    if not servers:
        ranks = [member_place(ground, "worker", rank) for rank in range(workers)]
        return ranks + [member_place(ground, "spare", number) for number in range(spares)]
    roles = [("coordinator", 0)]
    roles += [("server", number) for number in range(servers)] + [("worker", rank) for rank in range(workers)]
    return [member_place(ground, role, rank, node=node) for node, (role, rank) in enumerate(roles)]


def member_place(other: World, role: str, number: int, *, node: int = 0, generation: int = 0) -> World:
    """A place in the same world as `other`'s: a worker's by its rank, any other by its number."""
    rank = number if role == "worker" else 0
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
    )


def describe_world(job: Job) -> dict[str, Any]:
    """What the `world` event says: nobody should have to guess which world was formed."""
    cluster, servers = job.cluster, servers_of(job)
    members = _count(cluster.workers, "worker")
    if servers:
        members += f", {_count(servers, 'server')} and a coordinator"
    elif cluster.spares:
        members += f" and {_count(cluster.spares, 'spare')}"
    threads = _count(cluster.threads_per_worker, "thread")
    return {
        "workers": cluster.workers,
        "spares": cluster.spares,
        **({"servers": servers} if servers else {}),
        "hosts": 1,
        "slots": job.num_slots,
        "strategy": job.strategy,
        "threads": cluster.threads_per_worker,
        "text": f"{members} on 1 host, {threads} each, loopback only",
    }


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
