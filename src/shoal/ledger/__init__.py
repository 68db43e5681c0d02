"""Who trains on which samples: the order of an epoch and the cuts of a batch, as functions of an index."""

from shoal.ledger.cuts import Cut, Schedule
from shoal.ledger.order import Order

__all__ = ["Cut", "Order", "Schedule"]
