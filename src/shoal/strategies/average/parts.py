"""The parameters in several parts of about one size, each of which is agreed on by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shoal.model.replica import Replica
from shoal.strategies.average.values import AgreedValues
from shoal.strategies.groups.vectors import ValueSpan, Vectors


@dataclass(frozen=True, kw_only=True)
class TensorRows:
    """Of one tensor, so many of its rows."""

    span: ValueSpan
    """Where they lie in the vectors of all values."""
    tensor: str
    first: int
    """The first of them."""


def cut_in_parts(spans: Sequence[ValueSpan], count: int) -> list[list[TensorRows]]:
    """Parts in the order of the spans, cut between rows where that makes them most equal; some may be empty."""
    total = sum(span.shape.numel() for span in spans)
    parts: list[list[TensorRows]] = [[] for _ in range(count)]
    done = 0
    for span in spans:
        rows, size = _rows_of(span)
        # By part: how many rows of this tensor lie before its end.
        ends = [min(rows, max(0, round((total * (part + 1) / count - done) / size))) for part in range(count)]
        ends[-1] = rows
        for part, (first, last) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if first < last:
                parts[part].append(_cut(span, first, last, rows, size))
        done += span.shape.numel()
    return parts


def _rows_of(span: ValueSpan) -> tuple[int, int]:
    """How many rows a tensor has, and the elements of each."""
    rows = span.shape[0] if span.shape else 1
    return rows, max(1, span.shape.numel() // max(1, rows))


def _cut(span: ValueSpan, first: int, last: int, rows: int, size: int) -> TensorRows:
    if last - first == rows:
        return TensorRows(span=span, tensor=span.name, first=0)
    name, shape = f"{span.name}[{first}:{last}]", torch.Size([last - first, *span.shape[1:]])
    cut = ValueSpan(name=name, kind=span.kind, start=span.start + first * size, shape=shape)
    return TensorRows(span=cut, tensor=span.name, first=first)


class StreamedPart:
    """One of them in a replica: read, and written back. The last has the buffers, too."""

    def __init__(
        self, rows: Sequence[TensorRows], replica: Replica, values: AgreedValues, *, is_last: bool
    ) -> None:
        self._rows, self._replica, self._values = rows, replica, values
        self._ranges: dict[torch.dtype, slice] = {}
        """By kind: the elements of the vectors of all values."""
        for row in rows:
            before = self._ranges.get(row.span.kind)
            self._ranges[row.span.kind] = slice(row.span.start if before is None else before.start, row.span.stop)
        self._counts = {kind: each.stop - each.start for kind, each in self._ranges.items()}
        """By kind: the elements of parameters, which come first."""
        self._buffers = values.buffers if is_last else []
        for span in self._buffers:
            start = (
                self._ranges[span.kind].start if span.kind in self._ranges else values.num_params.get(span.kind, 0)
            )
            self._ranges[span.kind] = slice(start, span.stop)
        self.spans = [self._moved(row.span) for row in rows]
        """Its parameters, in vectors of this part."""

    def _moved(self, span: ValueSpan) -> ValueSpan:
        return replace(span, start=span.start - self._ranges[span.kind].start)

    def of(self, vectors: Mapping[torch.dtype, torch.Tensor]) -> Vectors:
        """This part of the vectors of all values, where it lies."""
        return {kind: vectors[kind][each] for kind, each in self._ranges.items()}

    def params_of(self, vectors: Mapping[torch.dtype, torch.Tensor]) -> Vectors:
        """Of vectors of this part, what parameters have."""
        return {kind: vectors[kind][:count] for kind, count in self._counts.items()}

    def buffers_of(self, vectors: Mapping[torch.dtype, torch.Tensor]) -> Vectors:
        """Of vectors of this part, what buffers have."""
        return {
            kind: vectors[kind][self._counts.get(kind, 0) :]
            for kind, each in self._ranges.items()
            if each.stop - each.start > self._counts.get(kind, 0)
        }

    def _places(self) -> list[tuple[ValueSpan, torch.Tensor]]:
        found = []
        for row, span in zip(self._rows, self.spans, strict=True):
            tensor = self._replica.trained[row.tensor].detach()
            if tensor.dim():
                tensor = tensor[row.first : row.first + span.shape[0]]
            found.append((span, tensor))
        floats = self._values.floats() if self._buffers else {}
        return found + [(self._moved(span), floats[span.name].detach()) for span in self._buffers]

    @torch.no_grad()
    def read(self) -> Vectors:
        """A copy of the replica's values."""
        device = next(iter(self._replica.trained.values())).device
        found = {
            kind: torch.empty(each.stop - each.start, dtype=kind, device=device)
            for kind, each in self._ranges.items()
        }
        for span, tensor in self._places():
            span.of(found).copy_(tensor)
        return found

    @torch.no_grad()
    def write(self, vectors: Mapping[torch.dtype, torch.Tensor]) -> None:
        """Give the replica these values."""
        for span, tensor in self._places():
            tensor.copy_(span.of(vectors))
