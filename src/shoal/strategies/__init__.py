"""Strategies: ways for many processes to train one model, behind one small contract."""

from __future__ import annotations

from dataclasses import replace

from shoal.arena import supported
from shoal.errors import LaunchError
from shoal.spec import Data, Layer, ModelParallel, StrategySpec, World, as_mesh
from shoal.strategies.base import Strategy


def make_strategy(spec: StrategySpec, world: World, slots: int, *, replaceable: bool = False) -> Strategy:
    """The implementation of a strategy for a process of this world; `replaceable` by a spare if it dies."""
    if isinstance(spec, ModelParallel):
        from shoal.strategies.mesh.strategy import MeshStrategy

        return MeshStrategy(as_mesh(spec, world.world_size))
    if isinstance(spec, Layer):
        return _make_layerwise(spec, world)
    assert isinstance(spec, Data)
    if world.world_size == slots == 1 and spec.via == "auto" and not replaceable:
        from shoal.strategies.data.single import SingleProcess

        return SingleProcess()
    if spec.partition == "relay" and world.world_size > 1:
        from shoal.strategies.data.relay import RelayData

        return RelayData()
    if spec.via == "auto" and (world.device != "cpu" or not supported()):
        spec = replace(spec, via="backend")
    if spec.via in ("auto", "arena"):
        from shoal.strategies.data.arena import ArenaData

        if not supported():
            raise LaunchError("data: via=arena needs Linux on x86-64, with memfd and futex; use via=backend here.")
        return ArenaData(spec)
    from shoal.strategies.data.collective import CollectiveData

    return CollectiveData(spec)


def _make_layerwise(spec: Layer, world: World) -> Strategy:
    if spec.cuts_model:
        from shoal.strategies.layer.strategy import LayerStrategy

        return LayerStrategy(spec)
    from shoal.strategies.layer.phased import PhasedData

    return PhasedData(spec, world.device)


__all__ = ["Strategy", "make_strategy"]
