"""What workers agree on, as long vectors: trained parameters, and behind them the buffers that move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import nn

from shoal.model.buffers import moving_buffers
from shoal.spec.footprint import aligned
from shoal.strategies.groups.vectors import ValueSpan, Vectors


class ValueHolder(Protocol):
    """Who has values: a replica, or whoever has parts of one."""

    @property
    def trained(self) -> Mapping[str, torch.Tensor]:
        """What an optimizer updates, by name."""

    @property
    def module(self) -> nn.Module:
        """Has the buffers."""


class AgreedValues:
    """A replica's values, read into vectors and written back. Numbers of 16 bits travel as float32: a mean of them
    is none of them."""

    def __init__(self, replica: ValueHolder) -> None:
        """A blueprint has no values to be read; where they would lie is known all the same."""
        self._replica = replica
        self.params = self._lay_out(dict(replica.trained), {})
        """By kind, these come first."""
        self.num_params = {
            kind: max(s.stop for s in self.params if s.kind == kind) for kind in self._kinds(self.params)
        }
        """By kind: the elements of parameters."""
        self.buffers = self._lay_out(self.floats(), self.num_params)
        """Behind them, by their own names."""
        spans = [*self.params, *self.buffers]
        self.sizes = {kind: max(s.stop for s in spans if s.kind == kind) for kind in self._kinds(spans)}
        """By kind: all elements."""

    @property
    def num_bytes(self) -> int:
        """Of all vectors, each at the beginning of a cache line."""
        return sum(aligned(count * kind.itemsize) for kind, count in self.sizes.items())

    def views(self, memory: torch.Tensor) -> Vectors:
        """Vectors that lie one behind the other in so many bytes of memory."""
        found, start = Vectors(), 0
        for kind, count in self.sizes.items():
            found[kind] = memory[start : start + count * kind.itemsize].view(kind)
            start += aligned(count * kind.itemsize)
        return found

    @staticmethod
    def _kinds(spans: list[ValueSpan]) -> list[torch.dtype]:
        return list(dict.fromkeys(span.kind for span in spans))

    @staticmethod
    def _lay_out(tensors: Mapping[str, torch.Tensor], used: Mapping[torch.dtype, int]) -> list[ValueSpan]:
        spans, ends = [], dict(used)
        for name, tensor in tensors.items():
            kind = torch.promote_types(tensor.dtype, torch.float32)
            start = ends.get(kind, 0)
            spans.append(ValueSpan(name=name, kind=kind, start=start, shape=tensor.shape))
            ends[kind] = start + tensor.numel()
        return spans

    def floats(self) -> dict[str, torch.Tensor]:
        """Looked up whenever it is asked for: buffers may be put elsewhere."""
        found = moving_buffers(self._replica.module)
        return {f"buffer {number}": each for number, each in enumerate(found) if each.is_floating_point()}

    def whole_numbers(self) -> list[torch.Tensor]:
        """Buffers that have no mean, such as counts of batches."""
        return [each for each in moving_buffers(self._replica.module) if not each.is_floating_point()]

    def _all(self) -> Iterator[tuple[ValueSpan, torch.Tensor]]:
        yield from zip(self.params, self._replica.trained.values(), strict=True)
        yield from zip(self.buffers, self.floats().values(), strict=True)

    @torch.no_grad()
    def read(self) -> Vectors:
        """A copy of all values."""
        found: dict[torch.dtype, list[torch.Tensor]] = {}
        for span, tensor in self._all():
            found.setdefault(span.kind, []).append(tensor.detach().to(span.kind).reshape(-1))
        return {kind: torch.cat(parts) for kind, parts in found.items()}

    @torch.no_grad()
    def read_into(self, vectors: Mapping[torch.dtype, torch.Tensor]) -> None:
        """Copy all values there."""
        for span, tensor in self._all():
            span.of(vectors).copy_(tensor.detach())

    @torch.no_grad()
    def write(self, vectors: Mapping[torch.dtype, torch.Tensor]) -> None:
        """Give the replica these values."""
        for span, tensor in self._all():
            tensor.detach().copy_(span.of(vectors))

    @torch.no_grad()
    def begin_with(self, values: Mapping[str, torch.Tensor]) -> None:
        """Give the trained parameters these values, by name."""
        for name, param in self._replica.trained.items():
            param.detach().copy_(values[name])

    def params_of(self, vectors: Mapping[torch.dtype, torch.Tensor]) -> Vectors:
        """The part of these vectors that parameters have."""
        return {kind: vectors[kind][:count] for kind, count in self.num_params.items()}
