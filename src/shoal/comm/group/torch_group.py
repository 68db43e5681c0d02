"""A group that talks through torch's own collectives: gloo for what lies in the host's memory, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shoal.arena.tensors import as_bytes
from shoal.comm.group.base import Group, Rows, Transfer, sum_in_order
from shoal.comm.group.lone import OVER, LoneGroup
from shoal.comm.listening import only_meanwhile

OnBlock = Callable[[], None] | None
"""Called before this process waits for others in a call that cannot look up."""


class TorchGroup(Group):
    """Some of torch's default process group, or all of it. Its waits end when a peer is lost, or after torch's own
    timeout; nobody can leave them."""

    def __init__(
        self,
        index: int,
        ranks: Sequence[int],
        *,
        handle: Any = None,
        on_block: OnBlock = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """`handle`: torch's group; None: the default one."""
        self.index, self.ranks = index, tuple(ranks)
        self._handle = handle
        self._on_block = on_block
        self._on_close = on_close

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduce_(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._reduce_(tensor, dist.ReduceOp.MAX)

    def _reduce_(self, tensor: torch.Tensor, operation: Any) -> torch.Tensor:
        if not tensor.numel():
            return tensor
        self._block()
        whole = tensor if tensor.is_contiguous() else tensor.contiguous()
        dist.all_reduce(whole, operation, group=self._handle)
        return tensor if whole is tensor else tensor.copy_(whole)

    def reduce_scatter(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        self._block()
        if len({part.shape for part in parts}) > 1:
            return self._reduce_each(parts)
        # Each adds up for itself: on CPUs that is faster than gloo's own way, and in the order of ranks.
        sent = torch.stack(list(parts))
        received = torch.empty_like(sent)
        if sent.numel():
            dist.all_to_all_single(received, sent, group=self._handle)
        return sum_in_order(list(received), torch.empty_like(received[0]))

    def _reduce_each(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        sums = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        self._wait_for(
            dist.reduce(one, self.ranks[index], group=self._handle, async_op=True)
            for index, one in enumerate(sums)
            if one.numel()
        )
        return sums[self.index]

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._block()
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        if tensor.numel():
            dist.all_gather(parts, tensor, group=self._handle)
        return parts

    def all_gather_(self, slices: Sequence[torch.Tensor]) -> None:
        self._block()
        self._wait_for(
            dist.broadcast(one, self.ranks[index], group=self._handle, async_op=True)
            for index, one in enumerate(slices)
            if one.numel()
        )

    def broadcast_(self, tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
        self._block()
        if tensor.numel():
            dist.broadcast(tensor, self.ranks[index], group=self._handle)
        return tensor

    def barrier(self) -> None:
        self._block()
        dist.barrier(group=self._handle)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Transfer:
        content = as_bytes(tensor.detach().contiguous())
        if not content.numel():
            return OVER
        work = dist.isend(content, self.ranks[to], group=self._handle, tag=tag)
        return _TorchTransfer(work, content, self._block)

    def receive(self, room: torch.Tensor, sender: int, tag: int = 0) -> Transfer:
        content = as_bytes(room.detach())
        if not content.numel():
            return OVER
        work = dist.irecv(content, self.ranks[sender], group=self._handle, tag=tag)
        return _TorchTransfer(work, content, self._block)

    def split(self, rows: Rows) -> Group:
        rank = self.ranks[self.index]
        if len(rows) == 1:
            return self
        mine: Group = LoneGroup(rank)
        with only_meanwhile():
            for row in rows:
                handle = dist.new_group(list(row)) if len(row) > 1 else None
                if rank in row and handle is not None:
                    mine = TorchGroup(row.index(rank), row, handle=handle, on_block=self._on_block)
        return mine

    def close(self) -> None:
        if self._on_close is not None:
            self._on_close()

    def _block(self) -> None:
        if self._on_block is not None:
            self._on_block()

    def _wait_for(self, works: Any) -> None:
        for work in list(works):
            work.wait()


@dataclass(frozen=True)
class _TorchTransfer:
    work: Any
    content: torch.Tensor
    """Kept until it has arrived."""
    on_block: Callable[[], None]

    def wait(self) -> None:
        self.on_block()
        self.work.wait()
