"""Synchronous data parallel: one step for all, computed on parts of the batch."""

from __future__ import annotations

from dataclasses import replace

from shoal.arena import supported
from shoal.errors import LaunchError
from shoal.spec import Data, World
from shoal.strategies.base import Strategy


def make(spec: Data, world: World, slots: int, *, replaceable: bool = False) -> Strategy:
    """The way that suits this process."""
    if world.world_size == slots == 1 and spec.via == "auto" and not replaceable:
        from shoal.strategies.data.single import SingleProcess

        return SingleProcess()
    if spec.partition == "relay" and world.world_size > 1:
        from shoal.strategies.data.relay import RelayData

        return RelayData()
    if spec.compresses:
        from shoal.strategies.data.compressed import CompressedData

        return CompressedData(spec)
    if spec.via == "auto" and (world.device != "cpu" or not supported()):
        spec = replace(spec, via="backend")
    if spec.via == "chain" and world.is_spread:
        from shoal.strategies.data.spread import SpreadData

        return SpreadData(spec)
    if spec.via == "arena" and world.device != "cpu":
        from shoal.strategies.data.device_arena import DeviceArenaData

        return DeviceArenaData(spec)
    if spec.via in ("auto", "arena", "chain"):
        from shoal.strategies.data.arena import ArenaData

        if not supported():
            raise LaunchError("data: via=arena needs Linux on x86-64, with memfd and futex; use via=backend here.")
        return ArenaData(spec)
    from shoal.strategies.data.collective import CollectiveData

    return CollectiveData(spec)
