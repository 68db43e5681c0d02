"""What a store asks of a server, what it is answered, and who waits for whom."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.comm.codec import Frame
from shoal.comm.compression import Compression, Packed, make_compression
from shoal.errors import unknown

_KINDS = ("dist_async", "dist_sync", "dist_ssp")


@dataclass(frozen=True, kw_only=True)
class StoreConsistency:
    """Who waits for whom."""

    kind: str
    slack: int = 0
    """With `dist_ssp`: how many pushes a worker may be ahead of the slowest."""

    @classmethod
    def parse(cls, text: str) -> StoreConsistency:
        """`dist_sync`, `dist_async` or `dist_ssp:3`."""
        kind, _, slack = text.partition(":")
        if kind not in _KINDS or (kind == "dist_ssp") != slack.isdecimal():
            raise unknown("kv: the kind of store", text, ("local", "dist_async", "dist_sync", "dist_ssp:3"))
        return cls(kind=kind, slack=int(slack or 0))


@dataclass(frozen=True, kw_only=True)
class KvPacked:
    """Values, compressed."""

    how: str
    count: int
    """Of rows."""
    fields: dict[str, Any]
    frames: tuple[Frame, ...]

    @classmethod
    def of(cls, rows: Tensor, compression: Compression, key: Hashable) -> KvPacked:
        """Rows as a compression packs them, which remembers by the key what it has rounded off."""
        packed = compression.encode(key, rows)
        return cls(how=compression.text, count=len(rows), fields=packed.fields, frames=packed.frames)

    def unpacked(self, columns: int, dtype: torch.dtype) -> Tensor:
        """The rows again, or nearly."""
        rows = torch.empty(self.count, columns, dtype=dtype)
        make_compression(self.how).decode(Packed(self.fields, self.frames), rows)
        return rows


@dataclass(frozen=True, kw_only=True)
class KvRequest:
    """What a client asks of one server."""

    ask: str
    shard: int = 0
    client: bytes = b""
    sequence: int = 0
    """Which of this client's; it repeats one until it is answered."""
    worker: int = 0
    key: str = ""
    start: int = 0
    """Of a run of rows; where `rows` are given, these count."""
    count: int = 0
    is_last: bool = True
    """Of several requests that make one push."""
    look: tuple[Any, ...] = ()
    """Of a new key: rows, columns, dtype. Of a store: its kind, and how many workers it has."""
    rule: tuple[str, dict[str, Any]] | None = None
    rows: Tensor | None = None
    values: Tensor | None = None
    packed: KvPacked | None = None
    """In place of `values`."""

    @property
    def reads(self) -> bool:
        """Whether it changes nothing."""
        return self.ask in ("pull", "gather")


@dataclass(frozen=True, kw_only=True)
class KvAnswer:
    """What came of it."""

    sequence: int
    reason: str = ""
    """Why it was refused; empty where it was done."""
    values: Tensor | None = None
    waits: bool = False
    """It was heard, and has to wait for what others do."""
    moved_to: int | None = None
    """Another server has the shard: that one, or -1 where it is not known which."""
    memory: str = ""
    """After a hello, where they may use it: where processes of this host find the shard's memory."""
