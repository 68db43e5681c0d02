"""One model cut over many workers: by its state, its width, its depth, and the batch besides."""

from __future__ import annotations

from shoal.spec import ModelParallel, World, as_mesh
from shoal.strategies.base import Strategy


def make(spec: ModelParallel, world: World, slots: int, *, replaceable: bool = False) -> Strategy:
    """One worker of the grid."""
    from shoal.strategies.mesh.strategy import MeshStrategy

    return MeshStrategy(as_mesh(spec, world.world_size))
