"""A group of one: whatever it says, it says to itself."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import torch

from shoal.arena.tensors import as_bytes
from shoal.comm.group.base import Group, Rows, Transfer


class LoneGroup(Group):
    """One worker, in a job of one or along an axis of length one."""

    index = 0

    def __init__(self, rank: int = 0) -> None:
        self.ranks = (rank,)
        self._kept: defaultdict[int, deque[torch.Tensor]] = defaultdict(deque)

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def reduce_scatter(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return parts[0]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]

    def all_gather_(self, slices: Sequence[torch.Tensor]) -> None:
        return

    def broadcast_(self, tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
        return tensor

    def barrier(self) -> None:
        return

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Transfer:
        self._kept[tag].append(tensor.detach().clone())
        return OVER

    def receive(self, room: torch.Tensor, sender: int, tag: int = 0) -> Transfer:
        as_bytes(room).copy_(as_bytes(self._kept[tag].popleft().contiguous()))
        return OVER

    def split(self, rows: Rows) -> Group:
        return self

    def close(self) -> None:
        return


class _Over:
    def wait(self) -> None:
        return


OVER: Transfer = _Over()
"""A transfer that is over when it begins."""
