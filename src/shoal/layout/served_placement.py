"""Which server holds which part of a served model, as its spec wants it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.layout.lines import ALIGN_BYTES, Parcel
from shoal.layout.placement import Placement, place_shards
from shoal.spec import ParameterServer


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
