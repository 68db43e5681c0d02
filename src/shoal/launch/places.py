"""The places of a job: which processes it consists of, and what to call the world they form."""

from __future__ import annotations

import socket
from typing import Any

from shoal.errors import LaunchError, SpecError
from shoal.spec import Job, World
from shoal.spec.world import LOOPBACK


def plan_places(job: Job) -> list[World]:
    """One world for each worker, then for each spare."""
    if job.purpose == "script" and job.cluster.spares:
        raise SpecError(
            f"Cluster: spares={job.cluster.spares} was set for a script, but only Shoal's own training can "
            "hand a worker's place to another process; leave spares at 0."
        )
    address = f"{LOOPBACK}:{_choose_port(job.cluster.port)}"
    workers = [worker_place(job, rank, address) for rank in range(job.cluster.workers)]
    return workers + [spare_place(job, number, address) for number in range(job.cluster.spares)]


def worker_place(job: Job, global_rank: int, address: str) -> World:
    """Where the worker of this rank stands."""
    size = job.cluster.workers
    return World(
        global_rank=global_rank,
        world_size=size,
        local_rank=global_rank,
        local_size=size,
        coordinator=address,
    )


def spare_place(job: Job, number: int, address: str, generation: int = 0) -> World:
    """Where the spare of this number stands: outside, until it is called."""
    size = job.cluster.workers
    return World(
        role="spare",
        global_rank=number,
        world_size=size,
        local_size=size,
        coordinator=address,
        generation=generation,
    )


def describe_world(job: Job) -> dict[str, Any]:
    """What the `world` event says: nobody should have to guess which world was formed."""
    cluster = job.cluster
    workers = _count(cluster.workers, "worker")
    spares = f" and {_count(cluster.spares, 'spare')}" if cluster.spares else ""
    threads = _count(cluster.threads_per_worker, "thread")
    return {
        "workers": cluster.workers,
        "spares": cluster.spares,
        "hosts": 1,
        "slots": job.num_slots,
        "strategy": job.strategy,
        "threads": cluster.threads_per_worker,
        "text": f"{workers}{spares} on 1 host, {threads} each, loopback only",
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
