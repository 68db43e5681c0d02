"""What the members of a parameter-server job say to each other: typed, and checked when they arrive.

Members are numbered nodes. A node's number is never used again: whoever replaces a dead one is a new node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, dataclass_transform

from shoal.comm.codec import Frame

NOBODY = -1
COORDINATOR = 0
"""The node that whoever coordinates now answers to; terms tell successive coordinators apart."""

KINDS: dict[str, type[PsMessage]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class PsMessage:
    """One message, a frozen dataclass for each kind. Fields are plain data; the bulk, if any, lies in `frames`."""

    kind: ClassVar[str] = ""
    frames: tuple[Frame, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True, kw_only=True)(cls)
        cls.kind = cls.__dict__.get("kind", cls.__name__.lower())
        KINDS[cls.kind] = cls


class PushOutcome(StrEnum):
    """What became of a push."""

    APPLIED = "applied"
    """It is in the shard, alone or gathered with others, and in its backup."""
    DUPLICATE = "duplicate"
    """It, or another push of the same cells, had been applied before."""
    LATE = "late"
    """Its round was closed without it (quorum); the gradient is dropped."""
    OVERLAP = "overlap"
    """Some of its cells had been applied, others not: it cannot be taken; push the others apart."""


# Worker and server.


class Push(PsMessage):
    """A gradient (or locally trained parameters) for one shard."""

    shard: int
    generation: int
    """Of the shard, as its sender knows it; an older one is refused."""
    origin: int
    """The node that made it; with `sequence` it names the push for ever."""
    sequence: int
    clock_of: int
    """Whose clock it moves: a slot's, or a rank's where cells are leased."""
    clock: int
    """Which of that one's steps this is, from 1."""
    cells: list[int]
    """The parts of the data it was computed on, by global number."""
    based_on: int
    """The shard's version that it was computed from."""
    weight: float
    """What its samples count together."""
    loss: float
    """The sum of weight times loss."""
    scaled: bool = True
    """The gradient is a mean already (of the round where rounds are gathered); else it is to be divided by the
    weights that are gathered with it."""
    scale: float = 1.0
    """What the gradient is to be multiplied by: its worker has scaled it up, or clipped it, where it is an update
    of its own. The same for all that are gathered in one round."""
    buffer: int = 0
    """Where the bulk lies, for transports that do not carry it as frames: the buffer's number."""
    half: list[float] = field(default_factory=list)
    """With half precision, in lockstep: what all workers knew of the loss scale when they began this step."""
    found: list[float] = field(default_factory=list)
    """With half precision: what the gradient looks like; first of all, how many of its tensors are no numbers."""
    loss_parts: list[float] = field(default_factory=list)
    """Of each number that the loss is told with: the sum of weight times it; empty where that is not known."""

    @property
    def is_spoilt(self) -> bool:
        """Whether the gradient is no number, and so nothing to apply."""
        return bool(self.found) and self.found[0] > 0


class Ack(PsMessage):
    """The push is safe: its sender may forget it."""

    shard: int
    generation: int
    sequence: int
    outcome: str
    version: int
    floor: int
    """Everybody has come so far: the smallest clock."""
    rounds: int
    """The last clock whose pushes were gathered and applied as one update."""
    loss: float = 0.0
    """The mean loss of the last gathered round."""
    half: list[float] = field(default_factory=list)
    """What its pushes knew of the loss scale, and below the sum of what they found."""
    found: list[float] = field(default_factory=list)
    loss_parts: list[float] = field(default_factory=list)
    """The means of the numbers that the loss is told with, where all of its pushes told them."""


class Refused(PsMessage):
    """Not my shard, or not in this generation: look at the newest view, or ask the coordinator for it."""

    shard: int
    generation: int
    """The newest that the refusing node knows."""
    sequence: int


class Clocks(PsMessage):
    """How far a shard is: the answer to `Hello`, and told to all workers when their floor rises."""

    shard: int
    generation: int
    version: int
    floor: int
    rounds: int
    clocks: dict[int, int] = field(default_factory=dict)
    """All of them, by slot, or by rank where cells are leased; empty in the news that follow."""
    seen: int = 0
    """How many cells are in the values."""
    loss: float = 0.0
    half: list[float] = field(default_factory=list)
    """Of the last gathered round, as in `Ack`."""
    found: list[float] = field(default_factory=list)
    loss_parts: list[float] = field(default_factory=list)


class Hello(PsMessage):
    """A worker asks a shard how far it is: when it starts, and when news is overdue."""

    shard: int
    generation: int


class Pull(PsMessage):
    """A worker that shares no memory with the server asks for a shard's values."""

    shard: int
    generation: int
    ticket: int
    """Names this request; answers to older ones are ignored."""
    whole: bool = False
    """Optimizer state, too."""


class Values(PsMessage):
    """Part of a shard's values, as frames; parts come in parameter order, first layers first."""

    shard: int
    generation: int
    ticket: int
    version: int
    part: int
    parts: int


# Everybody and the coordinator.


class Join(PsMessage):
    """A member has started; repeated until a view names it."""

    node: int
    role: str
    """`server` or `worker`."""
    rank: int
    """A worker's rank; a server's number."""
    address: str
    host: int = 0
    """Which of the run's hosts it is on."""


class Report(PsMessage):
    """A member's sign of life, several times a second, and how it is doing."""

    node: int
    role: str
    rank: int
    view: int
    """The newest view it knows; the coordinator repeats a newer one."""
    facts: dict[str, Any]
    """step, loss, samples_per_s, queue, rss, and by shard version, delay (mean and largest), floor."""


class LeaseRequest(PsMessage):
    """A worker asks for cells to train on, and says which of its cells every shard has acknowledged."""

    node: int
    rank: int
    ticket: int
    """Names this request; rises."""
    wanted: int
    """How many cells it wants to hold in all."""
    done: list[int]
    held: list[int]
    """Cells it has been given and that not every shard has acknowledged yet."""
    loss: list[float] = field(default_factory=list)
    """Of the cells it trained on last; empty while it has trained on none."""


class Lease(PsMessage):
    """All the cells that the worker holds now; `over` where there will be no more."""

    term: int
    ticket: int
    """Of the request that it answers; what comes after the answer to a newer one is ignored."""
    cells: list[int]
    committed: int
    """Cells of the whole run that are known to be done."""
    dry: bool = False
    """The worker has asked for more than there were: others hold the last ones."""
    over: bool = False
    loss: list[float] = field(default_factory=list)
    """The newest that a worker has told, if any: who never had a cell knows no other."""


class Control(PsMessage):
    """A decision that a shard takes at one point of its log, so that its backup takes it at the same."""

    shard: int
    term: int
    number: int
    """Rises; a control that was logged already is only acknowledged."""
    action: str
    """`scale` (factor of the learning rate), `mark` (remember the values), `rollback` (to the last mark),
    `members` (the ranks that count)."""
    values: dict[str, Any]


class Controlled(PsMessage):
    """The control is in the shard's log, and in its backup's."""

    shard: int
    number: int


@dataclass(frozen=True, kw_only=True)
class ShardView:
    """Who holds a shard."""

    generation: int
    """The number of the view in which one of them last changed."""
    primary: int
    backup: int = NOBODY
    filled: bool = False
    """The backup has everything and may take over; else it is being filled, and nobody waits for it."""
    copy: int = 0
    """Which of the shard's two homes in shared memory is the primary's; the backup's is the other."""


class View(PsMessage):
    """The world as the coordinator has decided it. The newest (term, number) counts."""

    term: int
    number: int
    shards: list[Any]
    """One `[generation, primary, backup, filled, copy]` for each shard; see `shard_views`."""
    addresses: dict[int, str]
    workers: dict[int, int]
    """Rank to node, of those that are there."""
    settings: dict[str, Any]
    """What the coordinator has adjusted: `bound` (of ssp), `shares` by rank, `stop`; `moving`: the shards that are
    about to change hands; `deal`: `slots`, for each the node that fills it and how many did before, and those that
    are `recalled`, for another is to have them."""

    @property
    def shard_views(self) -> list[ShardView]:
        """The shards' holders, by shard."""
        return [ShardView(generation=g, primary=p, backup=b, filled=f, copy=c) for g, p, b, f, c in self.shards]


def shard_rows(shards: Sequence[ShardView]) -> list[Any]:
    """Shards' holders as a view carries them."""
    return [[s.generation, s.primary, s.backup, s.filled, s.copy] for s in shards]
