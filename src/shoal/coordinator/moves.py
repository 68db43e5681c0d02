"""How shards get new holders while training goes on: backups that are missing, then moves that were asked for.

A move needs no step of its own in the protocol: the shard's new server is made its backup, filled, and promoted.
While it is filled the shard has no other backup, so moves are slow on purpose: one shard at a time between two
servers, and none while a shard that lost its backup waits for a new one.

Where memory outlives its servers no death ends a move. All holders of a shard that is about to change hands are
told so, and keep a journal of it; the first change follows when they have said that they know. From then on
whoever dies is followed by one that goes on with what is in its home.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.coordinator.shards import ShardTable
from shoal.layout import rebalance
from shoal.ps.messages import NOBODY, ShardView


@dataclass(frozen=True)
class Change:
    """One change of a shard's holders, for the record."""

    what: str
    why: str
    numbers: dict[str, Any]


class ShardMoves:
    """Where shards should go, and the next steps to get them there."""

    def __init__(
        self, replicas: int, targets: Mapping[int, int] | None = None, *, outlives_servers: bool = False
    ) -> None:
        self._replicas = replicas
        self._outlives_servers = outlives_servers
        self.announced: dict[int, int] = {}
        """Shards that are about to change hands, and the view that first says so."""
        self.targets = dict(targets or {})
        """Shard to server number, of those that are to move."""
        self._voluntary: set[int] = set()
        """Shards whose backup is being filled because of a move."""

    def aim(
        self, table: ShardTable, servers: Mapping[int, int], num_servers: int, shard_bytes: Sequence[int]
    ) -> None:
        """Decide which shards have to move so that so many servers hold about as much each.

        Those that have not come yet count too: what is theirs waits for them.
        """
        numbers = {node: number for number, node in servers.items()}
        staying = {node for number, node in servers.items() if number < num_servers}
        heirs = [_heir(table[shard], staying) for shard in range(len(table))]
        # One that has no primary now lies in the memory of all: anybody can have it.
        owners = [numbers.get(heir, self.targets.get(shard, 0)) for shard, heir in enumerate(heirs)]
        self.targets = dict(enumerate(rebalance(owners, shard_bytes, range(num_servers))))

    def await_heir(self, orphans: Iterable[int], rank: int) -> None:
        """Shards whose server died go to where they were to move, or to whoever takes the dead one's seat."""
        for shard in orphans:
            self.targets.setdefault(shard, rank)

    def advance(
        self, table: ShardTable, servers: Mapping[int, int], num_servers: int, number: int
    ) -> list[Change]:
        """Change what can be changed now; `number` is that of the view to come."""
        nodes = [node for server, node in servers.items() if server < num_servers]
        self._redirect(table, servers, num_servers)
        changes = self._adopt(table, servers, number) + self._announce(table, nodes, number)
        shards = [shard for shard in range(len(table)) if table[shard].primary != NOBODY]
        self._voluntary = {shard for shard in self._voluntary if _is_filling(table, shard)}
        changes += [change for shard in shards if (change := self._cover(table, servers, nodes, shard, number))]
        if all(shard in self._voluntary for shard in shards if _is_filling(table, shard)):
            for shard in shards:
                changes += self._step(table, servers, nodes, shard, number)
        return changes

    def _redirect(self, table: ShardTable, servers: Mapping[int, int], num_servers: int) -> None:
        """What a death has left to a server that leaves, or to a seat that nobody will take, goes to another."""
        numbers = {node: number for number, node in servers.items()}
        for shard in range(len(table)):
            number = self.targets.get(shard, numbers.get(table[shard].primary, 0))
            if number >= num_servers:
                self.targets[shard] = number % num_servers

    def _adopt(self, table: ShardTable, servers: Mapping[int, int], number: int) -> list[Change]:
        """Let shards without a primary be gone on with by those that they wait for, as far as these have come."""
        changes = []
        for shard, goal in sorted(self.targets.items()):
            if table.may_adopt(shard) and goal in servers:
                table.adopt(shard, servers[goal], number)
                changes.append(
                    Change("adopted", "its values outlive their server", {"shard": shard, "by": servers[goal]})
                )
        return changes

    def _announce(self, table: ShardTable, nodes: list[int], number: int) -> list[Change]:
        """Note the shards whose holders are about to change by decision."""
        if not self._outlives_servers:
            return []
        moving = {
            shard
            for shard in range(len(table))
            if shard in self.targets
            or (table[shard].filled and not (self._replicas and table.is_backed_well(shard, nodes)))
        }
        new = sorted(moving - self.announced.keys())
        self.announced = {shard: self.announced.get(shard, number) for shard in sorted(moving)}
        return [Change("moving", "its holders are about to change", {"shard": shard}) for shard in new]

    def _may_change(self, table: ShardTable, shard: int) -> bool:
        """Whether those that have all of a shard know that they are to keep a journal."""
        if not self._outlives_servers:
            return True
        since, view = self.announced.get(shard), table[shard]
        holders = (view.primary, view.backup) if view.filled else (view.primary,)
        return since is not None and all(table.knows(node, since) for node in holders)

    def _cover(
        self, table: ShardTable, servers: Mapping[int, int], nodes: list[int], shard: int, number: int
    ) -> Change | None:
        """Give a shard a backup that has none; or take away the one that a move without replicas left."""
        view = table[shard]
        if self._replicas and view.backup == NOBODY:
            goal = servers.get(self.targets.get(shard, NOBODY))
            moves = goal not in (None, view.primary)
            backup = goal if moves else table.least_loaded(nodes, but=view.primary)
            if backup is not None and table.may_back(shard, backup):
                if moves:
                    self._voluntary.add(shard)
                table.assign_backup(shard, backup, number)
                return Change("backup", f"shard {shard} had none", {"shard": shard, "backup": backup})
        elif not self._replicas and view.filled and shard not in self.targets and self._may_change(table, shard):
            table.assign_backup(shard, NOBODY, number)
            return Change("uncovered", "its move was called off", {"shard": shard})
        return None

    def _step(
        self, table: ShardTable, servers: Mapping[int, int], nodes: list[int], shard: int, number: int
    ) -> list[Change]:
        """The next step of a shard that is to move, or whose backup leaves, or would be lost with its primary."""
        view = table[shard]
        goal = servers.get(self.targets.get(shard, NOBODY))
        if goal == view.primary:
            del self.targets[shard]
            goal = None
        backup_leaves = goal is None and view.filled and not table.is_backed_well(shard, nodes)
        if backup_leaves:
            goal = table.least_loaded(nodes, but=view.primary)
        if _is_filling(table, shard) or (goal is None and not backup_leaves):
            return []
        if not self._may_change(table, shard):
            return []
        if goal is None:
            table.assign_backup(shard, NOBODY, number)
            return [Change("uncovered", "its backup leaves and no other server stays", {"shard": shard})]
        if {view.primary, goal} in self._busy_pairs(table):
            return []
        if view.filled and view.backup == goal:
            self._voluntary.add(shard)
            return self._arrive(table, servers, nodes, shard, number)
        if not table.may_back(shard, goal):
            return self._vacate(table, shard, number)
        self._voluntary.add(shard)
        table.assign_backup(shard, goal, number)
        return [Change("filling", "the shard moves, or its backup does", {"shard": shard, "to": goal})]

    def _vacate(self, table: ShardTable, shard: int, number: int) -> list[Change]:
        """The home is another's: it is told to leave, and the new server comes when it has."""
        if table[shard].backup == NOBODY:
            return []
        table.assign_backup(shard, NOBODY, number)
        return [Change("vacated", "another server is to have its home", {"shard": shard})]

    def _arrive(
        self, table: ShardTable, servers: Mapping[int, int], nodes: list[int], shard: int, number: int
    ) -> list[Change]:
        """The shard's new server has all of it: it becomes the primary, and gets a backup of its own."""
        table.promote(shard, number)
        del self.targets[shard]
        moved = Change("moved", "its new server has all of it", {"shard": shard, "to": table[shard].primary})
        covered = self._cover(table, servers, nodes, shard, number)
        return [moved] if covered is None else [moved, covered]

    def _busy_pairs(self, table: ShardTable) -> list[set[int]]:
        moving = (table[shard] for shard in self._voluntary if _is_filling(table, shard))
        return [{view.primary, view.backup} for view in moving]


def _heir(view: ShardView, staying: Collection[int]) -> int:
    """Whom a shard is best left to: its primary, or, where that one leaves, a backup that stays."""
    return view.backup if view.primary not in staying and view.filled and view.backup in staying else view.primary


def _is_filling(table: ShardTable, shard: int) -> bool:
    return table[shard].backup != NOBODY and not table[shard].filled
