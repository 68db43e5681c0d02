"""A group of threads of one process. It counts what processes in their places would send."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from shoal.arena.tensors import as_bytes
from shoal.comm.group.base import Group, Rows, Transfer, largest, sum_in_order
from shoal.comm.group.lone import OVER
from shoal.errors import PeerLost

T = TypeVar("T")
PATIENCE_S = 60.0


class _Table:
    """Where threads meet."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=PATIENCE_S)
        self.brought: list[torch.Tensor] = [torch.empty(0)] * count
        self.changed = threading.Condition()
        self.letters: defaultdict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)
        """By sender, receiver and tag."""
        self.split: dict[tuple[int, ...], _Table] = {}

    def part(self, row: tuple[int, ...]) -> _Table:
        """Where the threads of a row meet: the first to ask makes it."""
        with self.changed:
            return self.split.setdefault(row, _Table(len(row)))


class ThreadGroup(Group):
    """One of several threads."""

    def __init__(self, index: int, table: _Table, ranks: Sequence[int] | None = None) -> None:
        self.index = index
        self.ranks = tuple(range(len(table.brought)) if ranks is None else ranks)
        self.sent_bytes = 0.0
        self._table = table

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._count(tensor, self.size - 1)
        return self._exchanged(tensor)

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count(tensor, 2 * (self.size - 1) / self.size)
        sum_in_order(self._exchanged(tensor), tensor.detach())
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        self._count(tensor, 2 * (self.size - 1) / self.size)
        largest(self._exchanged(tensor), tensor.detach())
        return tensor

    def reduce_scatter(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([part.reshape(-1) for part in parts])
        self._count(flat, (self.size - 1) / self.size)
        sizes = [part.numel() for part in parts]
        mine = [one.split(sizes)[self.index] for one in self._exchanged(flat)]
        return sum_in_order(mine, torch.empty_like(mine[0])).view(parts[self.index].shape)

    def all_gather_(self, slices: Sequence[torch.Tensor]) -> None:
        for index, one in enumerate(slices):
            self.broadcast_(one, index)

    def broadcast_(self, tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
        self._count(tensor, self.size - 1 if index == self.index else 0)
        return tensor.copy_(self._exchanged(tensor)[index])

    def barrier(self) -> None:
        self._table.barrier.wait()

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Transfer:
        self._count(tensor, 1)
        with self._table.changed:
            self._table.letters[self.index, to, tag].append(tensor.detach().clone().contiguous())
            self._table.changed.notify_all()
        return OVER

    def receive(self, room: torch.Tensor, sender: int, tag: int = 0) -> Transfer:
        return _ThreadTransfer(self._table, (sender, self.index, tag), as_bytes(room.detach()))

    def split(self, rows: Rows) -> Group:
        rank = self.ranks[self.index]
        row = next(tuple(row) for row in rows if rank in row)
        return ThreadGroup(row.index(rank), self._table.part(row), row)

    def close(self) -> None:
        return

    def uncounted(self) -> ThreadGroup:
        """The same worker, for what shall not count."""
        return ThreadGroup(self.index, self._table)

    def leave(self) -> None:
        """Nobody shall wait for this one any more."""
        for table in (self._table, *self._table.split.values()):
            table.barrier.abort()

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


@dataclass(frozen=True)
class _ThreadTransfer:
    table: _Table
    way: tuple[int, int, int]
    room: torch.Tensor = field(repr=False)

    def wait(self) -> None:
        with self.table.changed:
            if not self.table.changed.wait_for(lambda: bool(self.table.letters[self.way]), PATIENCE_S):
                raise PeerLost(f"Thread {self.way[0]} has sent nothing.", peer=str(self.way[0]))
            self.room.copy_(as_bytes(self.table.letters[self.way].popleft()))


def together(count: int, act: Callable[[ThreadGroup], T]) -> list[T]:
    """What so many workers return who do the same at the same time; raises what one of them raises."""
    table = _Table(count)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def live(worker: ThreadGroup) -> None:
        try:
            results[worker.index] = act(worker)
        except BaseException as error:
            errors.append(error)
            worker.leave()

    threads = [threading.Thread(target=live, args=(ThreadGroup(index, table),)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [results[index] for index in range(count)]
