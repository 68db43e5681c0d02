"""A training state as whole tensors by name, whoever held the pieces; and memory to copy it to."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from shoal.checkpoint.block import Block, file_bytes, lay_out
from shoal.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that training needs to go on after `step`, in any strategy and with any number of workers."""

    step: int
    """Committed steps."""
    model: Mapping[str, torch.Tensor]
    """The module's `state_dict`: parameters and buffers."""
    optimizer: Mapping[str, torch.Tensor]
    """The optimizer's state, by `parameter/key`."""
    losses: torch.Tensor
    """The losses of steps 1 to `step`, in float64: a resumed run replays them through the scheduler."""
    rng: Mapping[str, torch.Tensor]
    """The states of random generators as bytes, by `rank/name`, as far as ranks gave theirs."""
    facts: Mapping[str, Any]
    """Plain JSON data: the job, its slots, evaluations, the ledger's position."""

    def parts(self) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
        """The tensors by part, each of which becomes a file."""
        yield "model", self.model
        yield "optimizer", self.optimizer
        yield "losses", {"losses": self.losses}
        yield "rng", self.rng

    def copy_into(self, room: Room) -> PackedSnapshot:
        """A copy that training does not touch, in memory kept from the last time."""
        blocks = {part: room.copy(part, tensors) for part, tensors in self.parts()}
        return PackedSnapshot.of(blocks, step=self.step, facts=_plain(self.facts))


@dataclass(frozen=True, kw_only=True)
class PackedSnapshot(Snapshot):
    """A snapshot whose parts lie in memory as they will lie in their files."""

    blocks: Mapping[str, Block]

    @classmethod
    def of(cls, blocks: Mapping[str, Block], *, step: int, facts: Mapping[str, Any]) -> PackedSnapshot:
        """The snapshot that the blocks of all parts hold."""
        found = {part: block.tensors() for part, block in blocks.items()}
        return cls(
            step=step,
            facts=facts,
            model=found["model"],
            optimizer=found["optimizer"],
            losses=found["losses"].get("losses", torch.empty(0, dtype=torch.float64)),
            rng=found["rng"],
            blocks=blocks,
        )


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A copy as it will come back from JSON."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(facts))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"Snapshot: its facts must be plain JSON data, found otherwise ({error}).") from None
    return copy


class Room:
    """Space for one snapshot at a time.

    Fresh pages cost several times more than the copy itself, so they are kept. They begin at a page's border,
    as a disk wants them that reads straight from memory.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, Block] = {}

    def copy(self, part: str, tensors: Mapping[str, torch.Tensor]) -> Block:
        """The tensors' values, until the next call for this part; tied ones stay tied."""
        locations = lay_out(tensors)
        block = self._blocks.get(part)
        if block is None or block.locations != locations:
            # In fresh memory all gaps are zeros, so that equal states make equal files.
            block = self._blocks[part] = Block(_pages(file_bytes(locations)), locations)
        filled = set()
        for location, target in zip(locations, block.tensors().values(), strict=True):
            if location.nbytes and location.offset not in filled:
                target.copy_(tensors[location.name].detach())
                filled.add(location.offset)
        return block


def _pages(nbytes: int) -> torch.Tensor:
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Large pages spare hundreds of faults per megabyte at the first copy, while training stands still.
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
