"""Optimizers that torch does not have. All are elementwise: a slice of the update is the slice's update."""

from __future__ import annotations

from shoal.optim.sag import SAG, history_weights

__all__ = ["SAG", "history_weights"]
