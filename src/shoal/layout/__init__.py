"""Pure decisions about where things go: no processes, no sockets, no torch."""

from shoal.layout.lines import ALIGN_BYTES, Parcel, Span
from shoal.layout.placement import POLICIES, Placement, place_served, place_shards, spread_backups
from shoal.layout.placement_table import ServerRow, binary_size, explain, render
from shoal.layout.rebalancing import rebalance

__all__ = [
    "ALIGN_BYTES",
    "POLICIES",
    "Parcel",
    "Placement",
    "ServerRow",
    "Span",
    "binary_size",
    "explain",
    "place_served",
    "place_shards",
    "rebalance",
    "render",
    "spread_backups",
]
