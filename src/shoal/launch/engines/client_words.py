"""What a supervisor and its client of somebody's cluster say to each other (`client.py`)."""

from __future__ import annotations

from typing import Any

from shoal.spec.told import Told, by_kind

# What is asked of a client.


class ClusterWanted(Told, kind="reach"):
    """Connect with this cluster; answered by `ClusterReached`."""

    address: str
    slots: int
    """How many workers there will be, where one asks for room when one connects."""
    cores: int
    """Of each slot."""


class RoomWanted(Told, kind="room"):
    """Hold so much on nodes of their own; answered by `RoomHeld`, or after a while by `RoomLacking`."""

    bundles: list[dict[str, Any]]
    """For each node what it must have, by the cluster's names of resources."""
    wait_s: float


class AgentsWanted(Told, kind="agents"):
    """Start an agent on each node that is held, under these names."""

    names: list[str]
    cores: list[int]
    address: str
    ports: str
    key: str
    """Of the run: for the agents alone."""


class MoreWanted(Told, kind="more"):
    """Start agents on so many nodes besides; answered by `MoreComing`, or by `RoomLacking`."""

    count: int
    bundle: dict[str, Any]
    """What each of them must have."""
    there: list[str]
    """Nodes that take part already."""
    calls: bool
    """Whether to have the cluster grow where it lacks one; whoever asks does so again later."""
    address: str
    ports: str
    key: str


class AgentUnwanted(Told, kind="unwanted"):
    """End an agent, whatever it does."""

    name: str


class ClientDismissed(Told, kind="dismissed"):
    """Give everything back, and end."""


# What a client says.


class ClusterReached(Told, kind="reached"):
    """There is such a cluster, of these nodes."""

    nodes: list[dict[str, Any]]
    """Of each: `name`, `address` and `has`, how much of each resource."""


class RoomHeld(Told, kind="held"):
    """On nodes of these names, so many cores on each."""

    nodes: list[str]
    cores: list[int]


class RoomLacking(Told, kind="lacking"):
    """It did not become free in time; this much is."""

    free: dict[str, Any]


class MoreComing(Told, kind="coming"):
    """Agents are being started on nodes of these names."""

    nodes: list[str]


class AgentOver(Told, kind="over"):
    """An agent has ended, for this reason."""

    name: str
    text: str


class ClientFailed(Told, kind="failed"):
    """Nothing can be had of this cluster, for this reason."""

    text: str


TO_CLIENT = by_kind(ClusterWanted, RoomWanted, AgentsWanted, MoreWanted, AgentUnwanted, ClientDismissed)
FROM_CLIENT = by_kind(ClusterReached, RoomHeld, RoomLacking, MoreComing, AgentOver, ClientFailed)
