"""What servers say to each other: a shard's log and its copies, and rounds that all shards close together."""

from __future__ import annotations

from typing import Any, ClassVar

from shoal.ps.messages import PsMessage

# Primary and backup.


class Replicate(PsMessage):
    """One entry of a shard's log, for its backup."""

    shard: int
    generation: int
    index: int
    """Entries are taken in this order, from 1, without gaps."""
    entry: dict[str, Any]
    """The push or control that was logged, packed; its bulk is in `frames`."""


class Replicated(PsMessage):
    """The backup has every entry up to this one."""

    shard: int
    generation: int
    index: int


class Fill(PsMessage):
    """All of a shard, for a new backup: bookkeeping here, values and optimizer state in `frames`."""

    shard: int
    generation: int
    index: int
    """The last log entry that it contains."""
    books: dict[str, Any]


class Filled(PsMessage):
    """The new backup has all of it; also told to the coordinator, by the primary."""

    shard: int
    generation: int
    index: int


# Shards that close their rounds together.


class RoundPart(PsMessage):
    """What a shard contributes to a round that all shards close together; see `settlement.py`."""

    kind: ClassVar[str] = "part"
    shard: int
    """Whom it is told to."""
    origin: int
    """The shard whose part it is."""
    round: int
    facts: dict[str, Any]
    """What the pushes in it count, where shards are whole copies: cells, weight, loss, scaled."""


class PartRequest(PsMessage):
    """A shard whose round is complete asks for a part that has not come."""

    shard: int
    origin: int
    """The shard that asks."""
    round: int


class Settle(PsMessage):
    """An entry of a shard's log: all parts of its complete round are known, and the update may be made.

    What others may have to be told again comes first in `frames`.
    """

    shard: int
    round: int
    factor: float
    """What the round's gradient is to be multiplied by."""
    facts: dict[str, Any]
    kept_frames: int
    """How many of the frames, with `facts`, others may have to be told again."""
    total: dict[str, Any]
    """Where shards add up: what the pushes of all count. The other frames are their sum."""
