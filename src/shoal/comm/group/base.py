"""The contract of a group: processes (or threads) of one job that compute together.

| form                | file               | for                                                       |
|---------------------|--------------------|-----------------------------------------------------------|
| `LoneGroup`         | `lone.py`          | one worker: nothing has to be said                        |
| `MemoryGroup`       | `memory.py`        | one host: memory that all of them map                     |
| `TorchGroup`        | `torch_group.py`   | torch's own collectives: gloo on CPUs, NCCL on GPUs       |
| `SocketGroup`       | `sockets.py`       | our own transport, authenticated                          |
| `HierarchicalGroup` | `hierarchical.py`  | several hosts: memory inside each, our transport between  |
| `ThreadGroup`       | `threads.py`       | threads of one process, for trials of a cut               |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from shoal.arena.tensors import as_bytes

if TYPE_CHECKING:
    from shoal.arena import Segment

Rows = Sequence[Sequence[int]]
"""Ranks of the groups that a group is split into: each rank is in one of them."""
Fold = Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor]
"""Makes one tensor of those of all, by index, in the room that is given. What it made of the first ones may stand
for them: a group over several hosts folds one host's behind those of the hosts before it."""


Change = Callable[[torch.Tensor, torch.Tensor], object]
"""Writes what it makes of the first tensor, element by element, into the second, which may be the same."""


def _copied(given: torch.Tensor, out: torch.Tensor) -> None:
    if out.data_ptr() != given.data_ptr():
        out.copy_(given)


@dataclass(frozen=True)
class Reduction:
    """How tensors of all become one, element by element: it is done piece by piece, each while it is in the
    cache."""

    fold: Fold
    before: Change = _copied
    """What each does with its own before the others see it."""
    after: Change = _copied
    """What is done with the result."""

    def brought(self, own: torch.Tensor) -> torch.Tensor:
        """What one brings: a tensor of its own, unless it is left as it is."""
        if self.before is _copied:
            return own
        changed = torch.empty_like(own)
        self.before(own, changed)
        return changed


class Transfer(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Of one that was sent: until the other has taken it, and the tensor may change. Of one that is awaited:
        until it is there."""


class BegunSum(Transfer, Protocol):
    """A sum that goes on while its process does something else; once waited for, its tensor is the total."""

    def advance(self) -> None:
        """Do what can be done by now, without waiting."""


class Group(ABC):
    """Everybody in it makes the same calls in the same order, but for `send`, `receive` and `begin_sum`.

    Sums run in the order of ranks or are computed once, so all end with the same bits. A wait ends with what the
    caller's `on_idle` raises, where the form can look up while it waits.
    """

    index: int
    """Of this process in the group."""
    ranks: tuple[int, ...]
    """Of all in the group, by index: their numbers in the job."""

    shares_memory: ClassVar[bool] = False
    """Whether `share` gives anything."""
    sums_ahead: bool = False
    """Whether what `begin_sum` has begun goes on before it is waited for."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @abstractmethod
    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum in place."""

    def begin_sum(self, tensor: torch.Tensor, number: int) -> BegunSum:
        """Sum in place, later; until then nobody touches the tensor. All begin the same sums, each under a number
        of its own, in any order, and wait for them in one order. The bits are those of `all_reduce_`."""
        return _SumInTheEnd(self, tensor)

    @abstractmethod
    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum, in place."""

    def reduce_(self, tensor: torch.Tensor, how: Reduction) -> torch.Tensor:
        """Make one tensor of everybody's, in place."""
        flat = flat_in_host(tensor)
        own = how.brought(flat)
        found = [row.view(flat.dtype) for row in self.all_gather(as_bytes(own))]
        how.after(how.fold(found, torch.empty_like(flat)), flat)
        return write_back(flat, tensor)

    @abstractmethod
    def reduce_scatter(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of everybody's part of this index; parts may differ in size, and are left as they are."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor, by index; all have one shape. This process's own may be the tensor itself."""

    @abstractmethod
    def all_gather_(self, slices: Sequence[torch.Tensor]) -> None:
        """Slice i is taken from the one with index i, wherever it has another value; slices may differ in size."""

    @abstractmethod
    def broadcast_(self, tensor: torch.Tensor, index: int = 0) -> torch.Tensor:
        """Take the values of the one with this index."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once all have come here."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Transfer:
        """Put a tensor of the host's memory on its way and go on. Leave it alone until the transfer is over."""

    @abstractmethod
    def receive(self, room: torch.Tensor, sender: int, tag: int = 0) -> Transfer:
        """Fill a tensor of the host, whose elements lie side by side, with the next one under this tag, which has
        as many bytes; it is there once the transfer is over."""

    def pump(self) -> None:  # noqa: B027 - where others need not be told, nothing has to be done
        """Take in what has come, for one who is busy otherwise: its sender must know that it arrived."""

    @abstractmethod
    def split(self, rows: Rows) -> Group:
        """This process's row as a group of its own; everybody in this group names all rows, in one order."""

    def share(self, regions: Mapping[str, int]) -> Segment | None:
        """Memory of these regions, by name and bytes, that all in the group map; None where this form has none."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Leave the others; what was split off goes with it."""


@dataclass(frozen=True)
class _SumInTheEnd:
    """Where nothing can be done before all have come."""

    group: Group
    tensor: torch.Tensor

    def advance(self) -> None:
        """All have to be there."""

    def wait(self) -> None:
        self.group.all_reduce_(self.tensor)


def flat_in_host(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements side by side in the host's memory: its own where they lie so, else a copy."""
    return tensor.detach().cpu().contiguous().view(-1)


def write_back(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Give a tensor its new values where they are in a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def sum_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """The sum of parts, the first with the second and so on, so that it comes to the same bits wherever it is
    computed. `out` may be the memory of one of the first two parts, of no other."""
    if len(parts) == 1:
        return out.copy_(parts[0])
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)
    return out


def largest(parts: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """The elementwise maximum of parts."""
    out.copy_(parts[0])
    for part in parts[1:]:
        torch.maximum(out, part, out=out)
    return out
