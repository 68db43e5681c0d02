"""What else this machine does."""

from __future__ import annotations

import os

import psutil

from shoal.launch.messages import Load
from shoal.spec import Cluster

_GLANCE_S = 0.1


def read_load() -> Load:
    """The load of this machine since the last call."""
    cores = len(os.sched_getaffinity(0))
    busy = psutil.cpu_percent(interval=None) / 100
    return Load(idle_cores=cores * (1 - busy), waiting=os.getloadavg()[0] - cores)


def starting_workers(cluster: Cluster) -> int:
    """How many workers to begin with: one for each idle core, within the limits."""
    if not cluster.is_elastic:
        return cluster.workers
    psutil.cpu_percent(interval=_GLANCE_S)
    idle = len(os.sched_getaffinity(0)) * (1 - psutil.cpu_percent(interval=_GLANCE_S) / 100)
    assert cluster.min_workers is not None
    return max(cluster.min_workers, min(cluster.places, round(idle)))
