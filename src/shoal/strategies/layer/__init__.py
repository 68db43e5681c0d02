"""A model by its layers: placed on workers, decoupled with heads of their own, or trained in turns."""

from __future__ import annotations

from shoal.spec import Layer, World
from shoal.strategies.base import Strategy


def make(spec: Layer, world: World, slots: int, *, replaceable: bool = False) -> Strategy:
    """One worker of this form of it."""
    if spec.cuts_model:
        from shoal.strategies.layer.strategy import LayerStrategy

        return LayerStrategy(spec)
    from shoal.strategies.layer.phased import PhasedData

    return PhasedData(spec, world.device)
