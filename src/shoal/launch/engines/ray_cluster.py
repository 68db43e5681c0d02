"""`--on ray`: nodes of a Ray cluster, each held by a bundle of one placement group, with an agent on each."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec

from shoal.errors import LaunchError, SpecError
from shoal.launch.engines.client import ClusterClient, knock
from shoal.launch.engines.client_words import (
    AgentsWanted,
    ClusterReached,
    ClusterWanted,
    MoreComing,
    MoreWanted,
    RoomHeld,
    RoomLacking,
    RoomWanted,
)
from shoal.launch.engines.ray_plan import (
    RayNode,
    RayWish,
    bundle_of_more,
    bundles_to_wait_for,
    plan_bundles,
    too_little,
)
from shoal.launch.remote.starting import AgentHandle, Invitation, address_towards
from shoal.spec import Cluster
from shoal.spec.world import LOOPBACK

_REACH_S = 13.0
"""How long a cluster may take to answer."""
_MORE_S = 5.0
"""How long it may take to say what nodes it has: whoever supervises a run waits for that, and its hosts for it."""
_SERVE_S = 60.0
"""The same where Ray starts a process for each client first."""


def make(written: str, tell: Callable[[str], None]) -> RayStarter:
    """Of `ray`, `ray:ADDRESS`, `ray://head:10001`, `ray:nodes=2,resources=fast:1`."""
    if find_spec("ray") is None:
        raise SpecError("Cluster: on=ray needs Ray, which is not installed here; pip install shoal[ray].")
    return RayStarter(RayWish.parse(written), tell)


class RayStarter:
    """Nodes as the cluster has them at the start of each attempt, so that new ones are used by the next."""

    patience_s = 30.0

    def __init__(self, wish: RayWish, tell: Callable[[str], None]) -> None:
        self.names: Sequence[str] = ()
        self.count = 0
        self._wish = wish
        self._tell = tell
        self._client: ClusterClient | None = None
        self._nodes: list[RayNode] = []

    def own_address(self, interface: str) -> str:
        self._reach()
        return address_towards(self._nodes[0].address if self._nodes else LOOPBACK, interface)

    def start(self, invitation: Invitation) -> list[AgentHandle]:
        assert self._client is not None
        try:
            return self._start(self._client, invitation)
        except Exception:
            self._client.close()
            raise

    def more(self, invitation: Invitation, count: int, there: Collection[str]) -> list[AgentHandle]:
        """On nodes that have come to the cluster since, or that the run has not used."""
        if self._client is None:
            raise LaunchError(
                f"Who began this run on {self._wish.shown} has ended, and what was held there went with it: no "
                "more hosts can be had; stop the run, and go on with --resume."
            )
        bundle = bundle_of_more(self._wish, invitation.cluster, len(there) + count)
        asked = MoreWanted(
            count=count,
            bundle=bundle,
            there=list(there),
            calls=bool(invitation.cluster.hosts),
            address=invitation.address,
            ports=invitation.ports,
            key=invitation.key.text,
        )
        answer = self._client.ask(asked, (MoreComing, RoomLacking), _MORE_S)
        if isinstance(answer, RoomLacking):
            wants = " and ".join(f"{much:g} {name}" for name, much in bundle.items())
            raise LaunchError(
                f"{count} more hosts were asked for, each with {wants}, but {self._wish.shown} has not so many "
                "nodes that this run does not use; add nodes to it, and ask again."
            )
        assert isinstance(answer, MoreComing)
        return list(self._client.hold(list(answer.nodes)))

    def _reach(self) -> None:
        if self._client is not None:
            self._client.close()
        where = self._wish.address or os.environ.get("RAY_ADDRESS", "")
        if ":" in where:
            knock(self._wish.shown, where)
        self._client = ClusterClient.start(self._wish.shown, "shoal.launch.engines.ray_client")
        try:
            asked = ClusterWanted(address=self._wish.address, slots=0, cores=0)
            within_s = _SERVE_S if where.startswith("ray://") else _REACH_S
            reached = self._client.ask(asked, (ClusterReached,), within_s)
        except BaseException:
            self._client.kill()
            raise
        self._nodes = [RayNode(**one) for one in reached.nodes]

    def _start(self, client: ClusterClient, invitation: Invitation) -> list[AgentHandle]:
        wish, bundles = self._wish, self._bundles(invitation.cluster)
        asked = RoomWanted(bundles=bundles, wait_s=wish.wait_s)
        held = client.ask(asked, (RoomHeld, RoomLacking), wish.wait_s + _REACH_S, invitation.wants_end)
        if isinstance(held, RoomLacking):
            raise LaunchError(too_little(self._nodes, wish, invitation.cluster, held.free))
        assert isinstance(held, RoomHeld)
        self.names = held.nodes
        self.count = len(self.names)
        client.say(
            AgentsWanted(
                names=list(self.names),
                cores=held.cores,
                address=invitation.address,
                ports=invitation.ports,
                key=invitation.key.text,
            )
        )
        return list(client.hold(list(self.names)))

    def _bundles(self, cluster: Cluster) -> list[dict[str, float]]:
        try:
            return plan_bundles(self._nodes, self._wish, cluster)
        except LaunchError:
            if not self._wish.waits:
                raise
        self._tell(f"waiting up to {self._wish.wait_s:.0f} s until {self._wish.shown} has what the run asks for")
        return bundles_to_wait_for(self._wish, cluster)
