"""How one parameter is cut over the workers of the tensor axis, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Split:
    """A dimension that is cut evenly; where it consists of `blocks` (query, key and value in one layer), each of
    them is, so that every worker has its part of all."""

    dim: int
    blocks: tuple[int, ...] = ()
    """Their sizes, which add up to the dimension's; none: it is one block."""

    def sizes(self, whole: int) -> tuple[int, ...]:
        """The blocks of a dimension of this size."""
        return self.blocks or (whole,)

    def fits(self, whole: int, count: int) -> bool:
        """Whether so many workers can have equal parts."""
        return sum(self.sizes(whole)) == whole and all(size % count == 0 for size in self.sizes(whole))

    def cut(self, whole: torch.Tensor, index: int, count: int) -> torch.Tensor:
        """The part of worker `index` of `count`; memory of its own."""
        blocks = whole.split(self.sizes(whole.shape[self.dim]), self.dim)
        return torch.cat([block.chunk(count, self.dim)[index] for block in blocks], self.dim).contiguous()

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole again, from the parts of all workers."""
        if not self.blocks:
            return torch.cat(list(parts), self.dim)
        sizes = [size // len(parts) for size in self.blocks]
        by_worker = [part.split(sizes, self.dim) for part in parts]
        return torch.cat([each[block] for block in range(len(sizes)) for each in by_worker], self.dim)
