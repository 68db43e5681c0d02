"""Pure decisions about where things go: no processes, no sockets, no torch."""

from shoal.layout.lines import ALIGN_BYTES, Parcel, Span
from shoal.layout.placement import POLICIES, Placement, place_served, place_shards, spread_backups
from shoal.layout.placement_table import ServerRow, binary_size, explain, render
from shoal.layout.rebalancing import rebalance
from shoal.layout.seating import Demand, Seating, explain_seating, seat_all, seat_one

__all__ = [
    "ALIGN_BYTES",
    "POLICIES",
    "Demand",
    "Parcel",
    "Placement",
    "Seating",
    "ServerRow",
    "Span",
    "binary_size",
    "explain",
    "explain_seating",
    "place_served",
    "place_shards",
    "rebalance",
    "render",
    "seat_all",
    "seat_one",
    "spread_backups",
]
