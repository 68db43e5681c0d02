"""Threads of one process that act as the workers of an axis."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")
PATIENCE_S = 60.0


class _Table:
    """Where threads meet."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=PATIENCE_S)
        self.brought: list[torch.Tensor] = [torch.empty(0)] * count


class ThreadWorker:
    """One of several threads. It counts what a process in its place would send."""

    def __init__(self, index: int, table: _Table) -> None:
        self.index = index
        self.sent_bytes = 0.0
        self._table = table

    @property
    def size(self) -> int:
        return len(self._table.brought)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._count(tensor, self.size - 1)
        return self._exchanged(tensor)

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count(tensor, 2 * (self.size - 1) / self.size)
        return tensor.copy_(torch.stack(self._exchanged(tensor)).sum(0))

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count(tensor, 2 * (self.size - 1) / self.size)
        return tensor.copy_(torch.stack(self._exchanged(tensor)).amax(0))

    def sum_scattered(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        brought = torch.stack(list(parts))
        self._count(brought, (self.size - 1) / self.size)
        return torch.stack([one[self.index] for one in self._exchanged(brought)]).sum(0)

    def uncounted(self) -> ThreadWorker:
        """The same worker, for what shall not count."""
        return ThreadWorker(self.index, self._table)

    def leave(self) -> None:
        """Nobody shall wait for this one any more."""
        self._table.barrier.abort()

    def _exchanged(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._table.brought[self.index] = tensor.detach().clone()
        self._table.barrier.wait()
        found = list(self._table.brought)
        self._table.barrier.wait()
        if len({one.shape for one in found}) > 1:
            raise ValueError("workers met with different shapes")
        return found

    def _count(self, tensor: torch.Tensor, times: float) -> None:
        self.sent_bytes += times * tensor.numel() * tensor.element_size()


def together(count: int, act: Callable[[ThreadWorker], T]) -> list[T]:
    """What so many workers return who do the same at the same time; raises what one of them raises."""
    table = _Table(count)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def live(worker: ThreadWorker) -> None:
        try:
            results[worker.index] = act(worker)
        except BaseException as error:
            errors.append(error)
            worker.leave()

    threads = [threading.Thread(target=live, args=(ThreadWorker(index, table),)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [results[index] for index in range(count)]
