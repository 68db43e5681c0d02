"""Placement: which pieces of a model live in which shard, and which server holds which shard.

All policies are one procedure. Parameters are laid out as lines (one for all, or one per layer kind), each shard
has a share, and each line is cut at the permitted places nearest to the shares. What rounding gave a shard too
much or too little in one line is made up for in the next, so that it never adds up.

There are more shards than servers where the model is large enough: shards move whole when servers come and go.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate

from shoal.errors import SpecError
from shoal.layout.lines import ALIGN_BYTES, ParameterLine, Parcel, Span, Stretch
from shoal.spec import ParameterServer
from shoal.spec.checks import require_choice, require_count

POLICIES = ("size", "count", "layer", "capacity")
LEAST_SHARD_BYTES = 256 * 1024
"""Smaller shards than this are made only where there would be fewer than servers."""
MOST_SHARDS = 12
"""Divides evenly by 1, 2, 3, 4 and 6 servers; more would only mean more messages."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where every element of every parameter lives."""

    shards: tuple[tuple[Span, ...], ...]
    """Each element is in exactly one shard; a shard's spans are in parameter order."""
    shard_bytes: tuple[int, ...]
    owners: tuple[int, ...]
    """The server of each shard."""
    backups: tuple[int | None, ...]
    """The server that keeps a copy of each shard, never its owner; None where nobody does."""
    capacities: tuple[float, ...]
    """One per server, in any unit; 0 for a server that has left."""

    @property
    def server_bytes(self) -> tuple[int, ...]:
        """What each server holds as owner."""
        return tuple(
            sum(self.shard_bytes[shard] for shard in self.shards_of(server))
            for server in range(len(self.capacities))
        )

    @property
    def imbalance(self) -> float:
        """By how much the most loaded server exceeds its fair share by capacity: 0.05 is five per cent."""
        fair_per_capacity = sum(self.shard_bytes) / sum(self.capacities)
        loads = zip(self.server_bytes, self.capacities, strict=True)
        return max(load / (capacity * fair_per_capacity) for load, capacity in loads if capacity) - 1

    def shards_of(self, server: int) -> list[int]:
        """The shards that a server owns."""
        return [shard for shard, owner in enumerate(self.owners) if owner == server]


def place_shards(
    parcels: Sequence[Parcel],
    *,
    servers: int,
    capacities: Sequence[float] = (),
    policy: str = "size",
    shards: int | None = None,
    replicas: int = 0,
    cut_bytes: int = ALIGN_BYTES,
) -> Placement:
    """Decide where a model's parameters live; the same arguments give the same answer everywhere.

    `size` cuts runs of equal bytes in parameter order; `count` gives each shard as many whole parameters;
    `layer` spreads each layer kind by bytes over all shards; `capacity` is `size` in proportion to the servers'
    capacities, the largest server first. Inside a parameter all cut at multiples of `cut_bytes`.
    """
    _check(servers, capacities, policy, replicas)
    capacities = tuple(capacities) or (1.0,) * servers
    lines = _lines(parcels, policy, cut_bytes)
    num_shards = _num_shards(parcels, lines, policy, servers, shards, cut_bytes)
    owners = _owners(capacities, policy, num_shards)
    spans = _spread(lines, _shares(owners, capacities, policy))
    return Placement(
        shards=spans,
        shard_bytes=tuple(
            sum((span.stop - span.start) * parcels[span.param].itemsize for span in shard) for shard in spans
        ),
        owners=owners,
        backups=spread_backups(owners, range(servers)) if replicas else (None,) * num_shards,
        capacities=capacities,
    )


def spread_backups(
    owners: Sequence[int], servers: Sequence[int], host_of: Mapping[int, int] | None = None
) -> tuple[int | None, ...]:
    """A backup for each shard. Each server's shards go round all others, so that its load is theirs if it dies.

    `host_of`: where the servers are; a backup is on another host than its owner, where any other has a server.
    """
    ring = sorted(servers)
    hosts = host_of or {}
    num_given = dict.fromkeys(ring, 0)
    backups: list[int | None] = []
    for owner in owners:
        index_in_ring = ring.index(owner)
        others = [*ring[index_in_ring + 1 :], *ring[:index_in_ring]]
        others = [server for server in others if hosts.get(server) != hosts.get(owner)] or others
        backups.append(others[num_given[owner] % len(others)] if others else None)
        num_given[owner] += 1
    return tuple(backups)


def _check(servers: int, capacities: Sequence[float], policy: str, replicas: int) -> None:
    require_choice("placement", "policy", policy, POLICIES)
    require_count("placement", "servers", servers)
    require_count("placement", "replicas", replicas, least=0)
    if capacities and len(capacities) != servers:
        raise SpecError(
            f"placement: capacities must be one number per server, found {len(capacities)} for {servers} servers."
        )
    if wrong := [capacity for capacity in capacities if not (capacity > 0 and math.isfinite(capacity))]:
        raise SpecError(f"placement: capacities must be positive numbers, found {wrong[0]!r}.")
    if replicas and servers == 1:
        raise SpecError(
            f"placement: replicas={replicas} needs a second server to keep the copy, found one; "
            "add servers or set replicas=0."
        )
    if replicas > 1:
        raise SpecError(f"placement: replicas must be 0 or 1, one backup for each shard, found {replicas}.")


def _lines(parcels: Sequence[Parcel], policy: str, cut_bytes: int) -> list[ParameterLine]:
    """The lines to cut. The one with the most pieces comes first: it gives every shard something."""
    groups: dict[str, list[Stretch]] = defaultdict(list)
    make = Stretch.whole if policy == "count" else partial(Stretch.by_bytes, cut_bytes=cut_bytes)
    for param, parcel in enumerate(parcels):
        if parcel.numel:
            groups[parcel.kind if policy == "layer" else ""].append(make(param, parcel))
    if not groups:
        raise SpecError("placement: the model has no parameters to place on servers.")
    return sorted((ParameterLine(group) for group in groups.values()), key=lambda line: -line.num_pieces)


def _num_shards(
    parcels: Sequence[Parcel],
    lines: Sequence[ParameterLine],
    policy: str,
    servers: int,
    asked: int | None,
    cut_bytes: int,
) -> int:
    """How many shards there are; a multiple of the servers where nobody asked for a number."""
    if asked is not None:
        require_count("placement", "shards", asked)
        if asked < servers:
            raise SpecError(
                f"placement: shards={asked} is fewer than the {servers} servers; give each at least one."
            )
    most = lines[0].num_pieces
    if most < (asked or servers):
        what = {"count": "parameters", "layer": f"pieces of {cut_bytes} bytes in its largest layer kind"}
        raise SpecError(
            f"placement: policy={policy} can make at most {most} shards of this model, which has {most} "
            f"{what.get(policy, f'pieces of {cut_bytes} bytes')}, but {asked or servers} are needed; "
            f"use fewer {'shards' if asked else 'servers'}."
        )
    by_size = min(sum(parcel.num_bytes for parcel in parcels) // LEAST_SHARD_BYTES, MOST_SHARDS, most)
    return asked or max(servers, by_size - by_size % servers)


def _owners(capacities: Sequence[float], policy: str, num_shards: int) -> tuple[int, ...]:
    """Each server's shards follow each other; the largest server has the first where capacity counts."""
    servers = list(range(len(capacities)))
    if policy == "capacity":
        servers.sort(key=lambda server: -capacities[server])
    return tuple(servers[shard * len(servers) // num_shards] for shard in range(num_shards))


def _shares(owners: Sequence[int], capacities: Sequence[float], policy: str) -> list[Fraction]:
    """The part of the model that each shard should hold, as exact fractions: no rounding may depend on order."""
    if policy == "count":
        return [Fraction(1, len(owners))] * len(owners)
    weights = [Fraction(capacity) if policy == "capacity" else Fraction(1) for capacity in capacities]
    return [weights[owner] / sum(weights) / owners.count(owner) for owner in owners]


def _spread(lines: Sequence[ParameterLine], shares: Sequence[Fraction]) -> tuple[tuple[Span, ...], ...]:
    """Cut each line by the shares."""
    bounds = list(accumulate(shares))[:-1]
    placed = [0] * len(bounds)
    total = 0
    shards: list[list[Span]] = [[] for _ in shares]
    for number, line in enumerate(lines):
        total += line.weight
        targets = [total * bound - before for bound, before in zip(bounds, placed, strict=True)]
        cuts = line.divide(targets, least=1 if number == 0 else 0)
        placed = [before + line.position(cut) for before, cut in zip(placed, cuts[1:-1], strict=True)]
        for shard, spans in zip(shards, line.spans(cuts), strict=True):
            shard += spans
    return tuple(tuple(sorted(shard)) for shard in shards)


def place_served(
    spec: ParameterServer, parcels: Sequence[Parcel], *, by_element: bool, cut_bytes: int = ALIGN_BYTES
) -> Placement:
    """`by_element`: whether the optimizer is. One that works on the whole gets the model as one shard, with a
    backup; where every host has a copy, that is one, too."""
    if spec.servers == "host":
        return place_shards(parcels, servers=1, shards=1)
    if not by_element:
        whole = place_shards(parcels, servers=1, shards=1)
        return replace(whole, backups=(1 if spec.num_replicas else None,))
    return place_shards(
        parcels,
        servers=spec.num_servers,
        capacities=spec.server_capacities,
        policy=spec.placement,
        shards=spec.num_shards,
        replicas=spec.num_replicas,
        cut_bytes=cut_bytes,
    )
