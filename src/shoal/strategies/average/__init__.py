"""Workers that train on their own, and agree on their parameters now and then."""

from __future__ import annotations

from shoal.arena import supported
from shoal.spec import Average, World
from shoal.strategies.base import Strategy


def make(spec: Average, world: World, slots: int, *, replaceable: bool = False) -> Strategy:
    """One worker with a model of its own; in memory that outlives it, where there is some and any can follow."""
    if spec.secure:
        from shoal.strategies.average.secure import SecureAverage

        return SecureAverage(spec)
    if spec.cuts_inside:
        from shoal.strategies.average.grids import AveragedGrids

        return AveragedGrids(spec)
    is_alone = world.world_size == 1 and not replaceable and not spec.clients
    if spec.shares_memory and world.device == "cpu" and not world.is_spread and not is_alone and supported():
        from shoal.strategies.average.arena import ArenaAverage
        from shoal.strategies.average.federated import FederatedAverage

        return FederatedAverage(spec) if spec.clients else ArenaAverage(spec)
    if spec.outlives_hosts_of(world.world_size) and world.device == "cpu" and world.is_spread and supported():
        from shoal.strategies.average.spread import SpreadAverage

        return SpreadAverage(spec)
    if spec.is_streamed:
        from shoal.strategies.average.streaming import StreamedAverage

        return StreamedAverage(spec)
    from shoal.strategies.average.strategy import AveragedModel

    return AveragedModel(spec)
