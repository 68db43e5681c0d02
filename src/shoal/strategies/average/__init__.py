"""Workers that train on their own, and agree on their parameters now and then."""

from __future__ import annotations

from shoal.spec import Average, World
from shoal.strategies.base import Strategy


def make(spec: Average, world: World, slots: int, *, replaceable: bool = False) -> Strategy:
    """One worker with a model of its own."""
    from shoal.strategies.average.strategy import AveragedModel

    return AveragedModel(spec)
