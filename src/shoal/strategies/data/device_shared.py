"""The job's state where workers share a GPU: the model in its memory, tables and counters in the host's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shoal.arena import FdShelf, Grid, SharedMemory, make_grid
from shoal.arena.device import DeviceDriver, DeviceSegment
from shoal.arena.tensors import flat_of
from shoal.errors import LaunchError
from shoal.model.optimizer.chunk import Home
from shoal.model.optimizer.kinds import StateSchema, rebuild, settings_of
from shoal.model.replica import Replica
from shoal.spec import World
from shoal.spec.footprint import MemoryRegion
from shoal.strategies.base import Setting
from shoal.strategies.data.shared import SharedState

_LOOK_S = 2e-4
_ALL_AT_ONCE = 1 << 60
"""Bytes of a chunk: whatever has one dtype is updated in one go, since a GPU is slow to begin and quick to do."""


@dataclass(frozen=True, kw_only=True)
class DeviceHome(Home):
    """Values on a device; flags, which Python looks at, on the host, and single numbers where the optimizer's own
    code keeps them."""

    host: SharedMemory
    on_host: frozenset[str]
    """The numbers that it keeps on the host."""

    def started(self, first_piece: int, count: int) -> torch.Tensor:
        return self._on_host.started(first_piece, count)

    def scalar_blocks(self, first_piece: int, count: int) -> list[torch.Tensor]:
        """Those of the host, and those of the device."""
        return self._on_host.scalar_blocks(first_piece, count) + super().scalar_blocks(first_piece, count)

    def scalar(self, piece: int, column: int, dtype: torch.dtype) -> torch.Tensor:
        if self.schema.scalars[column][0] in self.on_host:
            return self._on_host.scalar(piece, column, dtype)
        return super().scalar(piece, column, dtype)

    @property
    def _on_host(self) -> Home:
        return Home(segment=self.host, schema=self.schema)


class DeviceState(SharedState):
    """Regions of both memories as tensors."""

    def __init__(
        self,
        replica: Replica,
        schema: StateSchema,
        setting: Setting,
        regions: Sequence[MemoryRegion],
        memory: DeviceSegment,
    ) -> None:
        """`regions`: those of the host; `memory` has its own reserved."""
        super().__init__(replica, schema, setting, regions)
        self.device = replica.device
        self.nearly = range(self.marks.count, self.marks.count + setting.slots)
        """Counters, by slot: its gradients of this step are complete, or will be in a moment."""
        self.memory = self.device_memory = memory
        self.home = DeviceHome(
            segment=memory,
            schema=schema,
            host=self.segment,
            on_host=kept_on_host(replica.optimizer, replica.device),
        )

    def _make_grid(self) -> Grid:
        return device_grid(self.params)

    def finish_writes(self) -> None:
        if self.device != "cpu":
            torch.cuda.current_stream(self.device).synchronize()

    def await_nearly_all(self, until: float) -> None:
        """Wait until the GPU has done what it was asked for, or to that time of `time.perf_counter`."""
        if self.device == "cpu":
            return
        done = torch.cuda.Event()
        done.record()
        while time.perf_counter() < until and not done.query():
            time.sleep(_LOOK_S)

    def map_device(self, world: World) -> None:
        """Map the GPU's memory; the first worker makes it, where nobody has before."""
        if not self.device_memory.is_mapped:
            self.device_memory.map(makes=world.is_first, on_idle=self.setting.company.on_idle)


def device_grid(params: Sequence[torch.Tensor]) -> Grid:
    """Where the trained parameters lie; a chunk for each dtype."""
    return make_grid([flat_of(p) for p in params], _ALL_AT_ONCE)


def open_memory(driver: DeviceDriver, world: World, regions: Sequence[MemoryRegion]) -> DeviceSegment:
    """Memory of a GPU, not mapped yet, for processes that were given a shelf; or for one that is alone."""
    if not world.shelf_fds and world.world_size > 1:
        raise LaunchError(
            "data: via=arena shares a GPU's memory among processes that Shoal has started, but these were started "
            "otherwise; use via=backend, or shoal.train."
        )
    memory = DeviceSegment(driver, FdShelf.of(world.shelf_fds) if world.shelf_fds else FdShelf.make())
    for region in regions:
        memory.reserve(region.name, region.num_bytes)
    return memory


def kept_on_host(optimizer: torch.optim.Optimizer, device: str) -> frozenset[str]:
    """Which single numbers (the count of its steps, say) an optimizer keeps on the host, learnt by letting it take
    a step on a few elements."""
    found: set[str] = set()
    for group in optimizer.param_groups:
        probe = nn.Parameter(torch.zeros(3, dtype=group["params"][0].dtype, device=device))
        probe.grad = torch.ones_like(probe)
        twin = rebuild(optimizer, [{**settings_of(group), "params": [probe]}])
        twin.step()
        kept = twin.state[probe].items()
        found |= {key for key, value in kept if isinstance(value, torch.Tensor) and value.device.type == "cpu"}
    return frozenset(found)
