"""The parts of a model whose parameters are fetched just before they are used: first layers first.

While the first parts compute, the servers may still be at work on the last ones, or their values on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shoal.strategies.ps.memory import ServedMemory

SMALLEST_WORTHWHILE_BYTES = 1 << 20
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class FetchUnit:
    """A module that computes as a whole, and where its parameters lie."""

    module: nn.Module
    blocks: tuple[tuple[int, int], ...]
    """Shard and position of each block that holds some of them."""
    shards: tuple[int, ...]


def find_units(root: nn.Module, memory: ServedMemory) -> list[FetchUnit]:
    """The modules that hold all trained parameters between them; none where the root uses some of its own."""
    numbers = {id(param): number for number, param in enumerate(memory.params)}
    modules = list(_parts_of(root))
    held = {id(param) for module in modules for param in module.parameters()}
    if memory.grid.nbytes < SMALLEST_WORTHWHILE_BYTES or len(modules) < 2 or not numbers.keys() <= held:
        return []
    spots: dict[int, list[tuple[int, int]]] = {}
    for shard, blocks in enumerate(memory.blocks):
        for position, block in enumerate(blocks):
            for piece in block.chunk.pieces:
                spots.setdefault(piece.param, []).append((shard, position))
    units = []
    for module in modules:
        own = [numbers[id(param)] for param in module.parameters() if id(param) in numbers]
        blocks_of = sorted({spot for number in own for spot in spots.get(number, ())})
        units.append(FetchUnit(module, tuple(blocks_of), tuple(sorted({shard for shard, _ in blocks_of}))))
    return units


def _parts_of(root: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that have parameters and are no mere containers; not the root itself."""
    for child in root.children():
        if isinstance(child, _CONTAINERS):
            yield from _parts_of(child)
        elif any(True for _ in child.parameters()):
            yield child


class FetchOnUse:
    """Hooks that call `ensure(unit)` before a unit computes, once for each step."""

    def __init__(self, units: list[FetchUnit], ensure: Callable[[FetchUnit], None]) -> None:
        self._ensure = ensure
        self._stale: set[int] = set()
        self.units = units
        self._handles = [
            unit.module.register_forward_pre_hook(self._hook(number)) for number, unit in enumerate(units)
        ]

    def expire(self) -> None:
        """A new step begins: what was fetched is old."""
        self._stale = set(range(len(self.units)))

    def settle(self) -> None:
        """Everything is up to date, by other means."""
        self._stale.clear()

    def _hook(self, number: int) -> Callable[[nn.Module, tuple[object, ...]], None]:
        def before(module: nn.Module, inputs: tuple[object, ...]) -> None:
            if number in self._stale:
                self._stale.discard(number)
                self._ensure(self.units[number])

        return before

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def is_safe(units: list[FetchUnit], params: Sequence[torch.Tensor], compute: Callable[[], float]) -> bool:
    """Whether no unit's parameters are used before it computes itself.

    Tried out: all parameters become NaN, each unit's come back when its turn comes, and the loss must be the same.
    """
    expected = compute()
    kept = [param.detach().clone() for param in params]
    by_id = {id(param): copy for param, copy in zip(params, kept, strict=True)}

    def bring_back(unit: FetchUnit) -> None:
        for param in unit.module.parameters():
            if id(param) in by_id:
                param.data.copy_(by_id[id(param)])

    on_use = FetchOnUse(units, bring_back)
    on_use.expire()
    try:
        for param in params:
            param.data.fill_(torch.nan)
        return compute() == expected
    finally:
        on_use.close()
        for param, copy in zip(params, kept, strict=True):
            param.data.copy_(copy)
