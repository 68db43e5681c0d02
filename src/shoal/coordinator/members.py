"""Who takes part: members by node, and the seats that the job wants filled."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from shoal.ps.messages import Join
from shoal.spec.vocabulary import Role

SERVER, WORKER = Role.SERVER, Role.WORKER
ROLES = (SERVER, WORKER)

Seat = tuple[str, int]
"""Role and rank: what stays when a node is replaced."""


@dataclass(frozen=True)
class Member:
    """One process that takes part."""

    node: int
    role: str
    rank: int
    address: str
    host: int = 0

    @property
    def seat(self) -> Seat:
        return self.role, self.rank


@dataclass(frozen=True, kw_only=True)
class MemberOrder:
    """What the launcher is to do."""

    action: str
    """`start` or `end`."""
    role: str
    rank: int
    node: int | None = None
    """Whom to end; a process to be started gets its number from the launcher."""


class Members:
    """Who is in, who waits to be let in, and who is gone for good."""

    def __init__(self, rows: Iterable[Sequence[Any]] = (), gone: Iterable[int] = (), now: float = 0.0) -> None:
        self._members = {row[0]: Member(*row) for row in rows}
        self._heard = dict.fromkeys(self._members, now)
        self._gone = set(gone)
        self._waiting: dict[Seat, tuple[Member, float]] = {}

    def rows(self) -> list[list[Any]]:
        """The members as plain data."""
        return [list(astuple(member)) for member in self._members.values()]

    @property
    def gone(self) -> list[int]:
        """Nodes that must not come back."""
        return sorted(self._gone)

    @property
    def addresses(self) -> dict[int, str]:
        return {node: member.address for node, member in self._members.items()}

    @property
    def hosts(self) -> dict[int, int]:
        """By node: which of the run's hosts it is on."""
        return {node: member.host for node, member in self._members.items()}

    def __contains__(self, node: int) -> bool:
        return node in self._members

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._members))

    def __getitem__(self, node: int) -> Member:
        return self._members[node]

    def seats(self, role: str) -> dict[int, int]:
        """Rank to node, of those that are there, in the order of ranks."""
        return {m.rank: m.node for m in sorted(self._members.values(), key=lambda m: m.rank) if m.role == role}

    def is_taken(self, seat: Seat) -> bool:
        return any(member.seat == seat for member in self._members.values())

    def apply(self, join: Join, now: float) -> bool:
        """Somebody wants in; whether it is known or waits now (else it is nobody that could ever be let in)."""
        member = Member(join.node, join.role, join.rank, join.address, join.host)
        if join.node in self._gone or join.role not in ROLES or join.rank < 0:
            return False
        if join.node in self._members:
            self._heard[join.node] = now
            return self._members[join.node] == member
        self._waiting[member.seat] = (member, now)
        return True

    def admit(self, wanted: Collection[Seat], *, since: float) -> list[Member]:
        """Let in whoever waits for a free seat that is wanted and has asked since then; returns them."""
        admitted = []
        for seat, (member, asked) in list(self._waiting.items()):
            if seat in wanted and not self.is_taken(seat) and asked >= since:
                del self._waiting[seat]
                self._members[member.node] = member
                self._heard[member.node] = asked
                admitted.append(member)
        return admitted

    def beyond(self, wanted: Mapping[str, int]) -> list[Member]:
        """Those who wait for a seat that there is no more, because fewer of their role are wanted."""
        return [member for member, _ in self._waiting.values() if member.rank >= wanted[member.role]]

    def hear(self, node: int, now: float) -> None:
        """A sign of life."""
        if node in self._members:
            self._heard[node] = now

    def hear_all(self, now: float) -> None:
        """Nobody's silence so far counts."""
        self._heard = dict.fromkeys(self._members, now)

    def silent_for(self, node: int, now: float) -> float:
        """Seconds since a member's last sign of life."""
        return now - self._heard[node]

    def remove(self, node: int) -> Member | None:
        """A node is gone and its number is never used again; the member that it was."""
        self._gone.add(node)
        self._waiting = {seat: held for seat, held in self._waiting.items() if held[0].node != node}
        self._heard.pop(node, None)
        return self._members.pop(node, None)
