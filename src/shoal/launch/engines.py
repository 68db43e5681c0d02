"""Which engine a job's cluster names."""

from __future__ import annotations

from collections.abc import Callable

from shoal.launch.engine import Engine
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess
from shoal.spec import Cluster


def engine_for(
    cluster: Cluster,
    zygote: ZygoteProcess | None,
    *,
    tell: Callable[[str], None],
    wants_end: Callable[[], bool] = lambda: False,
) -> Engine:
    """What runs a job on this cluster. `zygote`: from which processes of this machine are forked; `tell` takes a
    line for the user; `wants_end`: whether the user has asked for the end."""
    if not cluster.is_remote:
        return LocalEngine(zygote)
    from shoal.launch.remote.gathering import AgentEngine
    from shoal.launch.remote.starting import starter_of

    return AgentEngine(starter_of(cluster, tell), wants_end=wants_end)
