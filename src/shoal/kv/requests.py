"""What a store asks of a server, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.comm.compression import Packed, make_compression
from shoal.errors import ProtocolError, SpecError, unknown
from shoal.ps.plain.messages import DeskRequest
from shoal.ps.plain.tensors import Piece, PlainBulk, fill

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
class KvRequest(DeskRequest):
    """What a client asks of one server. The bulk: which rows, where `has_rows`, and then values."""

    shard: int = 0
    worker: int = 0
    key: str = ""
    start: int = 0
    """Of a run of rows; where rows are named, these count."""
    count: int = 0
    """Of rows that are pulled as a run, or come compressed."""
    is_last: bool = True
    """Of several requests that make one push."""
    look: Sequence[Any] = ()
    """Of a new key: rows, columns, dtype. Of a store: its kind, and how many workers it has."""
    rule: Sequence[Any] | None = None
    """An optimizer's name, and its settings."""
    has_rows: bool = False

    @property
    def reads(self) -> bool:
        return self.ask in ("hello", "pull", "gather")

    @property
    def rows(self) -> Tensor | None:
        """Which ones."""
        return _as_tensor(self.bulk.pieces()[:1]) if self.has_rows else None

    def sent(self, most: int, columns: int, dtype: torch.dtype) -> Tensor:
        """What was sent, as rows of a table that has so many."""
        piece = self.bulk.pieces()[self.has_rows :]
        if not (piece and isinstance(piece[0], Packed)):
            return _as_tensor(piece)
        if not 0 <= self.count <= most:
            raise SpecError(
                f"kv: {self.count} rows were sent, but the key {self.key!r} has {most}; send rows of it."
            )
        rows = torch.empty(self.count, columns, dtype=dtype)
        fill(rows, piece[0], make_compression(self.compress))
        return rows


def carried(values: Piece | None = None, rows: Tensor | None = None) -> dict[str, Any]:
    """The bulk of a request, and what says what it is."""
    given = [one for one in (rows, values) if one is not None]
    return {"has_rows": rows is not None, "bulk": PlainBulk.of(given)}


def _as_tensor(pieces: Sequence[Piece]) -> Tensor:
    match pieces:
        case [Tensor() as tensor]:
            return tensor
    raise ProtocolError("A request for a store comes without the tensors that it announces.")
