"""Which engine a job's cluster names. Each is a file here, or of another package; all have agents started.

A package brings one of its own by an entry point of the group `shoal.engines`: a function that takes what the user
wrote behind the name, and a function for lines to the user, and gives a `Starter`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from shoal.launch.engine import Engine
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess
from shoal.spec import Cluster
from shoal.spec.cluster import ENGINE_POINTS

if TYPE_CHECKING:
    from shoal.launch.remote.starting import Starter

_MAKERS = {
    "ssh": "shoal.launch.engines.ssh:make",
    "hosts": "shoal.launch.engines.ssh:make_listed",
    "join": "shoal.launch.engines.by_hand:make",
    "k8s": "shoal.launch.engines.pods:make",
    "local": "shoal.launch.engines.here:make",
    "ray": "shoal.launch.engines.ray_cluster:make",
    "spark": "shoal.launch.engines.spark_cluster:make",
    "ranks": "shoal.launch.engines.ranks:make",
    "slurm": "shoal.launch.engines.slurm:make",
    "mpi": "shoal.launch.engines.mpi:make",
}


def engine_for(
    cluster: Cluster,
    zygote: ZygoteProcess | None,
    *,
    tell: Callable[[str], None],
    wants_end: Callable[[], bool] = lambda: False,
    show: Callable[[bytes], None] | None = None,
) -> Engine:
    """What runs a job on this cluster. `zygote`: from which processes of this machine are forked; `tell` takes a
    line for the user, and `show` what scripts print elsewhere; `wants_end`: whether the user has asked for the
    end."""
    if not cluster.is_remote:
        return LocalEngine(zygote)
    from shoal.launch.remote.gathering import AgentEngine

    return AgentEngine(starter_of(cluster, tell), tell=tell, wants_end=wants_end, show=show)


def starter_of(cluster: Cluster, tell: Callable[[str], None]) -> Starter:
    """What starts agents where `on=` says."""
    if cluster.engine in _MAKERS:
        module, _, name = _MAKERS[cluster.engine].partition(":")
        make = getattr(import_module(module), name)
    else:
        (found,) = entry_points(group=ENGINE_POINTS, name=cluster.engine)
        make = found.load()
    starter: Starter = make(cluster.engine_argument, tell)
    return starter
