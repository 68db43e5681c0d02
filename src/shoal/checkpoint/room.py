"""Memory in which a snapshot is copied, kept for the next one."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress

import torch

from shoal.checkpoint.block import Block, file_bytes, lay_out


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
