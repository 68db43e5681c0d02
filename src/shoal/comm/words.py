"""What a supervisor and its processes say to each other over channels, besides what happens (`happenings.py`).

Each side reads what it hears once, at its border; what cannot be understood becomes a word of its own, `Garbled`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from shoal.errors import ProtocolError
from shoal.observe.happenings import KINDS
from shoal.spec.told import Told, by_kind, read_message
from shoal.spec.vocabulary import Role

PARTING = "parting"
"""What workers of several hosts meet for at the end of a run, with the generation behind it."""


class Garbled(Told, kind="garbled"):
    """Something was said that means nothing here."""

    text: str


# What processes say.


class StacksOffered(Told, kind="stacks"):
    """How to ask a process where it is."""

    signal: int
    pid: int
    fd: int


class OrderedAction(StrEnum):
    """What a coordinator wants done about a process."""

    START = "start"
    END = "end"


class Ordered(Told, kind="order"):
    """A coordinator wants a process started, or one ended."""

    action: OrderedAction
    role: Role
    rank: int
    node: int | None = None
    """Which process is to end; one that is to start gets its number from the supervisor."""


class ScaleAnswered(Told, kind="answer"):
    """What becomes of a request for other numbers of processes."""

    text: str
    is_refused: bool = False
    workers: int | None = None
    servers: int | None = None
    hosts: int | None = None


class Announced(Told, kind="announced"):
    """A worker waits for all others of its run, and leaves something for them."""

    name: str
    """Of what they meet for; behind it `@generation`, where workers that are lost meanwhile are not waited for."""
    text: str


# What they are told.


class Stop(Told, kind="stop"):
    """The process is to end: a worker after its step."""


class Takeover(Told, kind="takeover"):
    """A spare is to go on with these places."""

    places: list[int]
    generation: int


class Adopt(Told, kind="adopt"):
    """A worker is to do the work of these places, too: at once, also in the middle of a step."""

    places: list[int]
    generation: int


class Release(Told, kind="release"):
    """A worker is to let go of these places at the next border between steps."""

    places: list[int]
    generation: int


class Redeal(Told, kind="redeal"):
    """Hosts were lost or have come: a worker is to meet all that there are now, at once, and go on with these
    places."""

    deal: list[list[int]]
    """By worker, in the order of hosts: its places."""
    hosts: list[int]
    """How many workers each host has; none where it is lost."""
    member: int
    """The number of the worker that this is said to."""
    generation: int
    torn: list[int] | None = None
    """Hosts on which a worker died alone, in the midst of something."""


class AwaitDeal(Told, kind="hold"):
    """A worker died alone: who misses it waits for the deal in which another has its place, however long it takes
    to get ready."""


class Misbehave(Told, kind="chaos"):
    """A worker is to do to itself what the user asked for: `slow` or `raise`."""

    fault: str
    factor: float
    seconds: float | None
    """How long it is slow; None: for ever."""


class MemberLost(Told, kind="lost"):
    """To a coordinator: this process has ended before its time."""

    node: int
    role: Role
    rank: int


class MemberLeft(Told, kind="left"):
    """To a coordinator: this process has done its work, and ended."""

    node: int
    role: Role
    rank: int


class MembersLiving(Told, kind="living"):
    """To a coordinator that can hear from now on: who lives, and which workers have done their work."""

    members: list[dict[str, Any]]
    """`node`, `role` and `rank` of each."""
    left: list[dict[str, Any]]


class ScaleWanted(Told, kind="scale"):
    """The user wants so many workers, servers and hosts; where all are None, to know how many there are."""

    why: str | None = None
    """Where it is not the user who wants it."""
    workers: int | None = None
    servers: int | None = None
    hosts: str | None = None
    """A number, or how many more or fewer: `+1`, `-1`."""


class CoordinatorMoved(Told, kind="coordinator"):
    """The coordinator is elsewhere from now on: its host is lost."""

    address: str


class Coordinate(Told, kind="coordinate"):
    """A standby is to be the coordinator from now on."""

    coordinator: str
    """Where, as its `World` has it."""


class MetAll(Told, kind="met"):
    """All workers have come."""

    name: str
    texts: list[str]
    """What they have left, by rank."""


FROM_PROCESSES: dict[str, type[Told]] = {**KINDS, **by_kind(StacksOffered, Ordered, ScaleAnswered, Announced)}
TO_PROCESSES: dict[str, type[Told]] = by_kind(
    *(Stop, Takeover, Adopt, Release, Redeal, AwaitDeal, Misbehave, MemberLost, MemberLeft, MembersLiving),
    *(ScaleWanted, MetAll, CoordinatorMoved, Coordinate),
)


def understood(message: Mapping[str, Any], kinds: Mapping[str, type[Told]]) -> Told:
    """What a message says, to somebody who knows these kinds."""
    try:
        return read_message(message, kinds)
    except ProtocolError as error:
        return Garbled(text=str(error))
