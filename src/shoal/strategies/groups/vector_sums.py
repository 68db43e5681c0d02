"""The sum of long vectors over all workers: as they are, or compressed between hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol

import torch

from shoal.arena.tensors import as_bytes
from shoal.comm.codec import Frame
from shoal.comm.compression import Compression, Packed, make_compression
from shoal.comm.group import Group
from shoal.errors import ProtocolError
from shoal.strategies.base import Setting
from shoal.strategies.groups.over_hosts import ranks_by_host
from shoal.strategies.groups.plain import put_plain, receive_plain
from shoal.strategies.groups.vectors import ValueSpan, Vectors

_PLAIN_BYTES = "bytes"
"""In the place of a type: the frame is no tensor."""


class VectorSums(Protocol):
    """Adds up vectors in place, with the same bits everywhere."""

    def all_reduce_(self, vectors: Vectors, spans: Sequence[ValueSpan]) -> None:
        """`spans`: the tensors that the vectors begin with."""

    def state(self) -> dict[str, torch.Tensor]:
        """What has not been sent yet, by name."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on with what `state` gave."""

    def facts(self) -> dict[str, Any]:
        """What a run's results say of the bytes."""


def make_sums(compress: str, group: Group, setting: Setting) -> VectorSums:
    """In the way that a key of the strategy asks for."""
    if compress == "none" or group.size == 1:
        return UncompressedSums(group, is_spread=setting.world.is_spread)
    return make_sent_sums(compress, group, setting)


def make_sent_sums(compress: str, group: Group, setting: Setting) -> CompressedSums:
    """Sums that can be under way while their workers do something else: each host sends to all others."""
    world = setting.world
    hosts = [[rank] for rank in group.ranks]
    if world.is_spread:
        there = [[rank for rank in ranks if rank in group.ranks] for ranks in ranks_by_host(world.hosts)]
        hosts = [ranks for ranks in there if ranks]
    return CompressedSums(group, hosts, make_compression(compress))


class UncompressedSums:
    """As the group adds up anything."""

    def __init__(self, group: Group, *, is_spread: bool) -> None:
        self._group = group
        self._is_spread = is_spread
        self._sent = 0

    def all_reduce_(self, vectors: Vectors, spans: Sequence[ValueSpan]) -> None:
        for vector in vectors.values():
            self._group.all_reduce_(vector)
            self._sent += vector.nbytes

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Nothing was left."""

    def facts(self) -> dict[str, Any]:
        if not self._is_spread:
            return {"kind": "memory"}
        return wire_facts("none", self._sent, self._sent)


class CompressedSums:
    """Inside a host, vectors are added up as they are; the first worker of each sends that, compressed, to those
    of the others. All add up what came out of it, their own included, in the order of hosts."""

    def __init__(self, group: Group, hosts: Sequence[Sequence[int]], compression: Compression) -> None:
        """`hosts`: of the group's ranks those on each."""
        self._inside = group.split([list(ranks) for ranks in hosts])
        rows = zip_longest(*hosts)
        self._across = group.split([[rank for rank in row if rank is not None] for row in rows])
        self._compression = compression
        self._plain = make_compression("none")
        """For what is no parameter: a variance of which a part is left out may be none any more."""

    def all_reduce_(self, vectors: Vectors, spans: Sequence[ValueSpan]) -> None:
        self.begin(vectors, spans).end()

    @torch.no_grad()
    def begin(self, vectors: Vectors, spans: Sequence[ValueSpan], tag: int = 0) -> SumUnderWay:
        """Send what this host has, and go on. Sums under one tag end in the order in which they began."""
        for vector in vectors.values() if self._inside.size > 1 else ():
            self._inside.all_reduce_(vector)
        own: list[Packed] = []
        pieces = [(self._compression, name, piece) for name, piece in _matrices(vectors, spans)]
        pieces += [(self._plain, name, piece) for name, piece in _rest(vectors, spans)]
        if self._inside.is_first:
            own = [codec.encode(name, piece.detach()) for codec, name, piece in pieces]
            head, content = _written(own)
            for peer in range(self._across.size):
                if peer != self._across.index:
                    # Nobody changes these, so nobody need wait until they have left.
                    put_plain(head, peer, self._across, tag)
                    self._across.send(content, peer, tag)
        sent = [(codec, piece) for codec, _, piece in pieces]
        return SumUnderWay(vectors, sent, own, self._inside, self._across, tag)

    def state(self) -> dict[str, torch.Tensor]:
        return self._compression.remembered()

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self._compression.remember(state)

    def facts(self) -> dict[str, Any]:
        codecs = (self._compression, self._plain)
        raw, wire = (sum(getattr(codec, name) for codec in codecs) for name in ("raw_bytes", "wire_bytes"))
        return wire_facts(self._compression.text, raw, wire)


class SumUnderWay:
    """A sum of which this host has sent its part."""

    def __init__(
        self,
        vectors: Vectors,
        pieces: Sequence[tuple[Compression, torch.Tensor]],
        own: Sequence[Packed],
        inside: Group,
        across: Group,
        tag: int,
    ) -> None:
        """`pieces`: of the vectors, with who decodes them; `own`: what this host has sent of each."""
        self._vectors, self._pieces, self._own = vectors, pieces, own
        self._inside, self._across, self._tag = inside, across, tag

    @torch.no_grad()
    def end(self) -> None:
        """Wait for the others' parts; the vectors are then the sum of all."""
        if self._inside.is_first:
            self._add_up()
        for vector in self._vectors.values() if self._inside.size > 1 else ():
            self._inside.broadcast_(vector)

    def _add_up(self) -> None:
        across = self._across
        totals = [torch.zeros_like(piece, memory_format=torch.contiguous_format) for _, piece in self._pieces]
        for index in range(across.size):
            found = self._own if index == across.index else _received(index, across, self._tag)
            for (codec, _), total, packed in zip(self._pieces, totals, found, strict=True):
                part = torch.empty_like(total)
                codec.decode(packed, part)
                total.add_(part)
        for (_, piece), total in zip(self._pieces, totals, strict=True):
            piece.copy_(total)


def wire_facts(compress: str, raw_bytes: int, wire_bytes: int) -> dict[str, Any]:
    """What a run's results say of what was sent."""
    ratio = wire_bytes / raw_bytes if raw_bytes else 1.0
    return {"kind": "tcp", "compress": compress, "raw_bytes": raw_bytes, "wire_bytes": wire_bytes, "ratio": ratio}


def _matrices(vectors: Vectors, spans: Sequence[ValueSpan]) -> Iterator[tuple[str, torch.Tensor]]:
    """What is compressed one by one: each parameter, as a matrix where it is more than a row."""
    for span in spans:
        if span.shape.numel():
            piece = span.of(vectors)
            yield span.name, piece.flatten(1) if piece.dim() > 1 else piece.view(-1)


def _rest(vectors: Vectors, spans: Sequence[ValueSpan]) -> Iterator[tuple[str, torch.Tensor]]:
    """What comes behind the parameters."""
    ends = {span.kind: span.stop for span in spans}
    for kind, vector in vectors.items():
        if len(rest := vector[ends.get(kind, 0) :]):
            yield f"rest of {kind}", rest


def _written(packed: Sequence[Packed]) -> tuple[list[Any], torch.Tensor]:
    """What a message says of its bytes, and these."""
    head = [[each.fields, [_looks(frame) for frame in each.frames]] for each in packed]
    return head, torch.cat([_bytes_of(frame) for each in packed for frame in each.frames])


def _looks(frame: Frame) -> list[Any]:
    if isinstance(frame, torch.Tensor):
        return [str(frame.dtype).removeprefix("torch."), list(frame.shape)]
    return [_PLAIN_BYTES, [memoryview(frame).nbytes]]


def _bytes_of(frame: Frame) -> torch.Tensor:
    if isinstance(frame, torch.Tensor):
        return as_bytes(frame.contiguous())
    return torch.frombuffer(bytearray(memoryview(frame)), dtype=torch.uint8)


def _received(sender: int, group: Group, tag: int) -> list[Packed]:
    head = receive_plain(sender, group, tag)
    content = torch.empty(
        sum(_num_bytes(kind, shape) for _, frames in head for kind, shape in frames), dtype=torch.uint8
    )
    group.receive(content, sender, tag).wait()
    found, at = [], 0
    for fields, frames in head:
        read = []
        for kind, shape in frames:
            part = content[at : at + _num_bytes(kind, shape)]
            at += len(part)
            read.append(_frame(part, kind, shape))
        found.append(Packed(fields, tuple(read)))
    return found


def _frame(part: torch.Tensor, kind: str, shape: Sequence[int]) -> Frame:
    if kind == _PLAIN_BYTES:
        return part.numpy().tobytes()
    # A copy, which begins where a number of this type may begin.
    return part.clone().view(_dtype(kind)).view(tuple(shape))


def _num_bytes(kind: str, shape: Sequence[int]) -> int:
    count = torch.Size(shape).numel()
    return count if kind == _PLAIN_BYTES else count * _dtype(kind).itemsize


def _dtype(kind: str) -> torch.dtype:
    found = getattr(torch, kind, None)
    if not isinstance(found, torch.dtype):
        raise ProtocolError(f"A packed tensor should name a type of number, found {json.dumps(kind)}.")
    return found
