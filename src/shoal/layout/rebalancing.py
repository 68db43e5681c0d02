"""Rebalancing: who owns which shard after servers came or went, with as few bytes moved as a balance needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.errors import SpecError

WORTH_MOVING = 0.02
"""A shard moves only if that takes at least this part of a fair share off the fuller of two servers."""


def rebalance(
    owners: Sequence[int],
    shard_bytes: Sequence[int],
    servers: Sequence[int],
    capacities: Mapping[int, float] | None = None,
) -> tuple[int, ...]:
    """The new owner of each shard among `servers`; shards stay where they are unless a move is worth it.

    Shards of servers that are gone are handed out first, the largest to the emptiest. Then the fullest server
    gives shards away for as long as that makes the fuller of the two noticeably emptier.
    """
    if not servers:
        raise SpecError("placement: no server is left to hold the shards; keep at least one.")
    if capacities is None:
        capacities = dict.fromkeys(servers, 1.0)
    if wrong := [server for server in servers if not capacities.get(server, 0.0) > 0]:
        raise SpecError(f"placement: server {wrong[0]} has no capacity; give every server a positive number.")
    loads = _Loads(owners, shard_bytes, {server: capacities[server] for server in sorted(servers)})
    orphans = [shard for shard, owner in enumerate(owners) if owner not in loads.capacities]
    for shard in sorted(orphans, key=lambda shard: -shard_bytes[shard]):
        loads.move(shard, loads.emptiest_with(shard))
    while (better := loads.next_move()) is not None:
        loads.move(*better)
    return tuple(loads.owners)


class _Loads:
    """Who owns what while shards are being reassigned. A load is in bytes per capacity."""

    def __init__(self, owners: Sequence[int], shard_bytes: Sequence[int], capacities: Mapping[int, float]) -> None:
        self.owners = list(owners)
        self.capacities = capacities
        self._shard_bytes = shard_bytes
        self._server_bytes = dict.fromkeys(self.capacities, 0)
        for owner, num_bytes in zip(owners, shard_bytes, strict=True):
            if owner in self._server_bytes:
                self._server_bytes[owner] += num_bytes
        self._worth = WORTH_MOVING * sum(shard_bytes) / sum(self.capacities.values())

    def move(self, shard: int, server: int) -> None:
        """Give a shard to a server."""
        if self.owners[shard] in self._server_bytes:
            self._server_bytes[self.owners[shard]] -= self._shard_bytes[shard]
        self._server_bytes[server] += self._shard_bytes[shard]
        self.owners[shard] = server

    def emptiest_with(self, shard: int) -> int:
        """The server that would be the least loaded with this shard added."""
        return min(self.capacities, key=lambda server: self._load(server, self._shard_bytes[shard]))

    def next_move(self) -> tuple[int, int] | None:
        """The shard and the server it should go to next: from the fullest server that can give with profit."""
        for giver in sorted(self.capacities, key=self._load, reverse=True):
            moves = [
                (
                    self._fuller_after(giver, shard, taker),
                    self._load(taker),
                    self._shard_bytes[shard],
                    shard,
                    taker,
                )
                for shard, owner in enumerate(self.owners)
                if owner == giver
                for taker in self.capacities
                if taker != giver
            ]
            if moves and min(moves)[0] < self._load(giver) - self._worth:
                return min(moves)[-2:]
        return None

    def _fuller_after(self, giver: int, shard: int, taker: int) -> float:
        """The load of the fuller of the two once the shard has moved."""
        num_bytes = self._shard_bytes[shard]
        return max(self._load(giver, -num_bytes), self._load(taker, num_bytes))

    def _load(self, server: int, added_bytes: int = 0) -> float:
        return (self._server_bytes[server] + added_bytes) / self.capacities[server]
