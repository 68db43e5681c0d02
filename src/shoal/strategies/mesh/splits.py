"""How one parameter is cut over the workers of the tensor axis, and put together again."""

from __future__ import annotations

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
        return torch.cat(self.parts(whole, index, count), self.dim).contiguous()

    def parts(self, whole: torch.Tensor, index: int, count: int) -> list[torch.Tensor]:
        """The same as views of the whole, block by block."""
        blocks = whole.split(self.sizes(whole.shape[self.dim]), self.dim)
        return [block.chunk(count, self.dim)[index] for block in blocks]

    def fill(self, whole: torch.Tensor, index: int, count: int, part: torch.Tensor) -> None:
        """Put the part of worker `index` of `count` where it belongs."""
        own = self.parts(whole, index, count)
        for target, values in zip(own, part.split([each.shape[self.dim] for each in own], self.dim), strict=True):
            target.copy_(values)
