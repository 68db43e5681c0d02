"""What a run asks of a Ray cluster: how much on how many nodes. No I/O, and no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.errors import LaunchError, SpecError, unknown
from shoal.observe.wording import plural
from shoal.spec import Cluster

_KEYS = ("nodes", "resources", "wait")
_WAIT_S = 8.0
"""How long to wait, unless told, for what others use just now: with all the rest a sentence comes within 15 s."""


@dataclass(frozen=True, kw_only=True)
class RayWish:
    """What a user writes behind `ray:`."""

    address: str = ""
    """Of the cluster; nothing: that of RAY_ADDRESS, or the one on this machine."""
    nodes: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    """What each node must have besides CPUs and GPUs."""
    wait_s: float = _WAIT_S

    @classmethod
    def parse(cls, written: str) -> RayWish:
        """Of `//head:10001,nodes=2,resources=fast:1+big:2,wait=300`."""
        given: dict[str, str] = {}
        for part in filter(None, written.split(",")):
            key, is_pair, value = part.partition("=")
            if not is_pair:
                key, value = "address", f"ray:{part}" if part.startswith("//") else part
            elif key not in _KEYS:
                raise unknown("Cluster: ray key", key, _KEYS)
            given[key] = value
        try:
            return cls(
                address="" if given.get("address") == "auto" else given.get("address", ""),
                nodes=_count(given["nodes"]) if "nodes" in given else None,
                resources=_amounts(given.get("resources", "")),
                wait_s=float(given.get("wait", _WAIT_S)),
            )
        except ValueError as error:
            raise SpecError(
                f"Cluster: on=ray:{written} is not understood ({error}); write for example "
                "ray:nodes=2,resources=fast:1+big:0.5,wait=300."
            ) from None

    @property
    def waits(self) -> bool:
        """Whether the user lets it wait until the cluster has more nodes."""
        return self.wait_s > _WAIT_S

    @property
    def shown(self) -> str:
        """The cluster, in words."""
        return f"the Ray cluster at {self.address}" if self.address else "the Ray cluster"


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """A node of the cluster that is there."""

    name: str
    address: str
    has: Mapping[str, float]
    """How much of each resource, used or not."""

    def room(self, per_worker: Mapping[str, float]) -> int:
        """For how many workers."""
        return int(min(self.has.get(name, 0) // amount for name, amount in per_worker.items()))


def plan_bundles(nodes: Sequence[RayNode], wish: RayWish, cluster: Cluster) -> list[dict[str, float]]:
    """What to ask of Ray, one bundle for each node. LaunchError where no such nodes are there.

    Workers go round the nodes that have room, those with most of it first; each takes as many CPUs as threads, or
    one, and with `device=cuda` a GPU.
    """
    per_worker = _per_worker(cluster)
    if cluster.hosts and wish.nodes is not None:
        raise SpecError(f"Cluster: nodes={wish.nodes} and hosts={cluster.hosts} say the same; leave nodes out.")
    fit = [one for one in nodes if all(one.has.get(name, 0) >= much for name, much in wish.resources.items())]
    fit = [one for one in fit if one.room(per_worker) > 0]
    fit.sort(key=lambda one: one.room(per_worker), reverse=True)
    if cluster.min_hosts is not None:
        share = cluster.workers_per_host
        count = min(sum(one.room(per_worker) >= share for one in fit), cluster.max_hosts or 1)
        if count < cluster.min_hosts:
            raise LaunchError(too_little(nodes, wish, cluster))
        return [_bundle(share, per_worker, wish)] * count
    count = min(cluster.workers, len(fit)) if wish.nodes is None else wish.nodes
    rooms = [one.room(per_worker) for one in fit[:count]]
    if wish.nodes is not None and wish.nodes > cluster.workers:
        raise SpecError(
            f"Cluster: nodes={wish.nodes}, but there are only {plural(cluster.workers, 'worker')}; ask for "
            "no more nodes than workers."
        )
    if len(rooms) < max(1, count) or sum(rooms) < cluster.workers:
        raise LaunchError(too_little(nodes, wish, cluster))
    return [_bundle(share, per_worker, wish) for share in _dealt(rooms, cluster.workers)]


def bundles_to_wait_for(wish: RayWish, cluster: Cluster) -> list[dict[str, float]]:
    """The same without looking at nodes: for a cluster that grows when it is asked for more than it has."""
    if cluster.min_hosts is not None:
        return [_bundle(cluster.workers_per_host, _per_worker(cluster), wish)] * cluster.min_hosts
    count = wish.nodes or 1
    whole, rest = divmod(cluster.workers, count)
    return [_bundle(whole + (number < rest), _per_worker(cluster), wish) for number in range(count)]


def bundle_of_more(wish: RayWish, cluster: Cluster, hosts: int) -> dict[str, float]:
    """What one more node must have, where there are so many with it: room for its share of the workers."""
    share = cluster.workers_per_host if cluster.hosts else max(1, cluster.workers // hosts)
    return _bundle(share, _per_worker(cluster), wish)


def too_little(
    nodes: Sequence[RayNode], wish: RayWish, cluster: Cluster, free: Mapping[str, float] | None = None
) -> str:
    """What was asked for, and what there is; `free`: what of it nobody used while we waited."""
    per_worker = _per_worker(cluster)
    names = [*per_worker, *wish.resources]
    asked = f"{_listed(per_worker, per_worker)} for each of {plural(cluster.workers, 'worker')}"
    asked += f", {_listed(wish.resources, wish.resources)} on each node" if wish.resources else ""
    asked += f", {plural(wish.nodes, 'node')}" if wish.nodes else ""
    asked += f", {cluster.workers_per_host} on each of at least {cluster.min_hosts} nodes" if cluster.hosts else ""
    has = "; ".join(f"{one.name} {_listed(names, one.has)}" for one in nodes)
    in_use = "" if free is None else f", of which {_listed(names, free)} were free within {wish.wait_s:.0f} s"
    return (
        f"The run asks for {asked}, but {wish.shown} has {has or 'no node'}{in_use}; ask for less, or have "
        "the run wait for more with ray:wait=SECONDS."
    )


def _per_worker(cluster: Cluster) -> dict[str, float]:
    cpus: dict[str, float] = {"CPU": cluster.threads or 1}
    return cpus | {"GPU": 1.0} if cluster.device == "cuda" else cpus


def _bundle(workers: int, per_worker: Mapping[str, float], wish: RayWish) -> dict[str, float]:
    return {name: workers * amount for name, amount in per_worker.items()} | dict(wish.resources)


def _dealt(rooms: Sequence[int], workers: int) -> list[int]:
    """Workers, one after the other to the node that has fewest and room for one more."""
    shares = [0] * len(rooms)
    for _ in range(workers):
        open_ones = [number for number, room in enumerate(rooms) if shares[number] < room]
        shares[min(open_ones, key=lambda number: shares[number])] += 1
    return shares


def _listed(names: Iterable[str], amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{amounts.get(name, 0):g} {name}" for name in names)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"nodes={text}")
    return int(text)


def _amounts(text: str) -> dict[str, float]:
    found = {}
    for part in filter(None, text.split("+")):
        name, _, amount = part.rpartition(":")
        found[name or part] = float(amount) if name else 1.0
    return found
