"""`--on spark://host:7077`, `--on spark` in a process that has a session: tasks of Spark's become agents."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from shoal.comm.channel import Channel
from shoal.errors import LaunchError, SpecError
from shoal.launch.engines.client import ClusterClient, knock
from shoal.launch.engines.client_words import (
    AgentsWanted,
    ClusterReached,
    ClusterWanted,
    RoomHeld,
    RoomLacking,
    RoomWanted,
)
from shoal.launch.remote.starting import AgentHandle, Invitation, address_towards
from shoal.observe.wording import plural
from shoal.spec import Cluster
from shoal.spec.world import LOOPBACK

_REACH_S = 180.0
"""How long a driver of Spark's may take to start: it is a machine of Java's."""
_ROOM_S = 10.0
_BARRIER_S = 60.0


def make(written: str, tell: Callable[[str], None]) -> SparkStarter:
    """Of `spark://host:7077`, `spark:local-cluster[2,1,1024]`, and `spark` for the session of this process."""
    if find_spec("pyspark") is None:
        raise SpecError("Cluster: on=spark needs Spark, which is not installed here; pip install shoal[spark].")
    master = f"spark:{written}" if written.startswith("//") else written
    session = None if master else _session_here()
    if not master and session is None:
        raise SpecError(
            "Cluster: on=spark is for the session of this Python process, which has none; make one, or name a "
            "master, as in spark://host:7077."
        )
    return SparkStarter(master, session)


class SparkStarter:
    """Executors of an application of Spark's: each is a host."""

    patience_s = 30.0

    def __init__(self, master: str, session: Any = None) -> None:
        self.names: Sequence[str] = ()
        self.count = 0
        self._master = master or session.sparkContext.master
        self._session = session

    def own_address(self, interface: str) -> str:
        first = self._master.split(",")[0]
        host = urlsplit(first).hostname if "://" in first else None
        return address_towards(host or LOOPBACK, interface)

    def start(self, invitation: Invitation) -> list[AgentHandle]:
        if self._session is None and "://" in self._master:
            knock(f"Spark at {self._master}", self._master.split(",")[0])
        client = ClusterClient.start(f"Spark at {self._master}", self._client())
        try:
            return self._start(client, invitation)
        except BaseException:
            client.close()
            raise

    def _client(self) -> str | Callable[[Channel], None]:
        if self._session is None:
            return "shoal.launch.engines.spark_client"
        from shoal.launch.engines.spark_client import SparkClient

        return lambda channel: SparkClient(channel, self._session).serve()

    def _start(self, client: ClusterClient, invitation: Invitation) -> list[AgentHandle]:
        cluster, wants_end = invitation.cluster, invitation.wants_end
        cores = cluster.threads or 1
        wanted = ClusterWanted(address=self._master, slots=cluster.workers, cores=cores)
        client.ask(wanted, (ClusterReached,), _REACH_S, wants_end)
        room = RoomWanted(bundles=[{"slots": cluster.workers, "cores": cores}], wait_s=_ROOM_S)
        held = client.ask(room, (RoomHeld, RoomLacking), _ROOM_S + _BARRIER_S, wants_end)
        if isinstance(held, RoomLacking):
            raise LaunchError(self._too_little(cluster, held.free["slots"]))
        assert isinstance(held, RoomHeld)
        self.names, self.count = held.nodes, len(held.nodes)
        client.say(
            AgentsWanted(
                names=held.nodes,
                cores=held.cores,
                address=invitation.address,
                ports=invitation.ports,
                key=invitation.key.text,
            )
        )
        return list(client.hold(held.nodes))

    def _too_little(self, cluster: Cluster, slots: int) -> str:
        each = f" of {plural(cluster.threads, 'core')}" if cluster.threads else ""
        return (
            f"The run asks for {plural(cluster.workers, 'slot')}{each}, one for each worker, but Spark at "
            f"{self._master} gave {slots} within {_ROOM_S:.0f} s; ask for less, or see what else runs there."
        )


def _session_here() -> Any:
    """The session that this process has made, if any."""
    if (sql := sys.modules.get("pyspark.sql")) is None:
        return None
    return sql.SparkSession.getActiveSession()
