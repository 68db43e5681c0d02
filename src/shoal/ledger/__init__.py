"""Who trains on which samples: the order of an epoch and the cuts of a batch, as functions of an index."""

from shoal.ledger.cuts import Cut, Schedule
from shoal.ledger.order import EpochOrder, Order
from shoal.ledger.samplers import make_order
from shoal.ledger.shares import Sizes, even_sizes, sizes_by_speed

__all__ = ["Cut", "EpochOrder", "Order", "Schedule", "Sizes", "even_sizes", "make_order", "sizes_by_speed"]
