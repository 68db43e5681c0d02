"""Who holds which shard, and the few ways in which that may change.

**Generations.** A shard's generation is the number of the view in which its holders last changed; primary,
backup and workers refuse what comes from an older one. Counting a backup as filled changes no holder and keeps
the generation. That is safe because of an order: the primary waits for its backup from the moment it says
`Filled`, before anybody else can know. So once the coordinator has noted `filled`, the backup has every
acknowledged push.

**Copies.** A shard has two homes. Its backup lies in the one that its primary does not use, so `copy` flips
when the backup is promoted, and a new backup overwrites what its predecessor left.

**Letting go.** Where all copies lie in one memory, whoever held a home and has not heard that it is another's
now would write into it: a backup the entries that are on their way, a deposed primary the pushes. So a home is
handed on only when its last holder has said that it knows the view that took it away, or is known to be dead.

**Orphans.** Where that memory outlives its servers, a shard whose primary is lost and that has no filled backup
is not: another server goes on with what lies in its home (`ps/inheritance.py`), once the dead one writes
nothing there any more. Until then nobody is its primary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.ps.messages import NOBODY, ShardView, shard_rows


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What the loss of a server means, by shard."""

    promoted: list[int]
    """Its backup took over."""
    uncovered: list[int]
    """It was the backup; there is none now."""
    orphaned: list[int]
    """It was the primary and no other server has everything."""


class ShardTable:
    """The holders of all shards. Changes take the number of the view that will tell of them."""

    def __init__(
        self,
        shards: Iterable[ShardView],
        shard_bytes: Sequence[int],
        leaving: Mapping[int, tuple[int, int]] | None = None,
        *,
        shares_memory: bool = False,
        deserting: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        self.leaving = dict(leaving or {})
        """By shard: who held the home beside the primary's and may still write there, and the number of the view
        that tells it not to."""
        self.deserting = dict(deserting or {})
        """The same of the primary's own home, of shards that have none now."""
        self.hosts: Mapping[int, int] = {}
        """By node: which of the run's hosts it is on."""
        self._shards = list(shards)
        self._known: dict[int, int] = {}
        """By node: the newest view that it has said it knows."""
        self._shard_bytes = shard_bytes
        self._shares_memory = shares_memory

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Sequence[Any]],
        shard_bytes: Sequence[int],
        leaving: Mapping[int, tuple[int, int]],
        *,
        shares_memory: bool,
        deserting: Mapping[int, tuple[int, int]],
    ) -> ShardTable:
        """The table that `rows` wrote."""
        views = (ShardView(generation=g, primary=p, backup=b, filled=f, copy=c) for g, p, b, f, c in rows)
        return cls(views, shard_bytes, leaving, shares_memory=shares_memory, deserting=deserting)

    def rows(self) -> list[Any]:
        """All of it as a view carries it."""
        return shard_rows(self._shards)

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, shard: int) -> ShardView:
        return self._shards[shard]

    def shards_of(self, primary: int) -> list[int]:
        """The shards that a node is the primary of."""
        return [shard for shard, view in enumerate(self._shards) if view.primary == primary]

    def involves(self, node: int) -> bool:
        """Whether a node holds anything, or may think so."""
        holds = any(node in (view.primary, view.backup) for view in self._shards)
        return holds or any(node == holder for holder, _ in self.leaving.values())

    def load(self, node: int) -> int:
        """Bytes that a node holds, as primary and as backup: both apply every update."""
        return sum(
            num_bytes
            for num_bytes, view in zip(self._shard_bytes, self._shards, strict=True)
            if node in (view.primary, view.backup)
        )

    def least_loaded(self, candidates: Collection[int], *, but: int) -> int | None:
        """The candidate that holds least, of those on other hosts than `but` where there are any; never `but`."""
        others = [node for node in candidates if node != but]
        apart = [node for node in others if self.hosts.get(node) != self.hosts.get(but)]
        return min(apart or others, key=lambda node: (self.load(node), node), default=None)

    def is_backed_well(self, shard: int, staying: Collection[int]) -> bool:
        """Whether its backup stays, and is on another host than its primary where there is one that could be."""
        view = self._shards[shard]
        at = self.hosts.get(view.primary)
        is_apart = self.hosts.get(view.backup) != at or all(self.hosts.get(node) == at for node in staying)
        return view.backup in staying and is_apart

    def can_lose(self, node: int, silent: Collection[int] = ()) -> bool:
        """Whether every shard of this primary has a backup that can take over, and that is not silent itself."""
        views = [self._shards[shard] for shard in self.shards_of(node)]
        return all(view.filled and view.backup not in silent for view in views)

    def lose(self, node: int, number: int) -> Loss:
        """A server is gone: filled backups take over, backups on it are dropped."""
        loss = Loss(promoted=[], uncovered=[], orphaned=[])
        for shard, view in enumerate(self._shards):
            if view.primary == node and view.filled:
                self.promote(shard, number)
                loss.promoted.append(shard)
            elif view.primary == node:
                self._orphan(shard, number)
                loss.orphaned.append(shard)
            elif view.backup == node:
                self.assign_backup(shard, NOBODY, number)
                loss.uncovered.append(shard)
        return loss

    def _orphan(self, shard: int, number: int) -> None:
        view = self._shards[shard]
        if view.backup != NOBODY:
            self._leave(shard, view.backup, number)
        self.deserting[shard] = (view.primary, number)
        self._shards[shard] = ShardView(generation=number, primary=NOBODY, copy=view.copy)

    def may_adopt(self, shard: int) -> bool:
        """Whether a shard has no primary, and its last one writes nothing in its home any more."""
        return self._shards[shard].primary == NOBODY and shard not in self.deserting

    def adopt(self, shard: int, node: int, number: int) -> None:
        """A server goes on with what the last primary left."""
        assert self.may_adopt(shard), f"shard {shard} has a primary that has not let go"
        self._shards[shard] = replace(self._shards[shard], generation=number, primary=node)

    def promote(self, shard: int, number: int) -> None:
        """The filled backup becomes the primary. The old primary may have logged what the backup never got, so it
        does not stay on as a filled copy."""
        view = self._shards[shard]
        assert view.filled, f"shard {shard} has no filled backup to promote"
        self._leave(shard, view.primary, number)
        self._shards[shard] = ShardView(generation=number, primary=view.backup, copy=1 - view.copy)

    def may_back(self, shard: int, node: int) -> bool:
        """Whether a node may have the home beside the primary's: nobody else may still write there."""
        last = {self._shards[shard].backup, self.leaving.get(shard, (NOBODY,))[0]}
        return not self._shares_memory or last <= {node, NOBODY}

    def assign_backup(self, shard: int, node: int, number: int) -> None:
        """A new backup, to be filled; or NOBODY."""
        view = self._shards[shard]
        if node != NOBODY:
            assert self.may_back(shard, node), f"shard {shard} has a backup that has not let go"
            self.leaving.pop(shard, None)
        elif view.backup != NOBODY:
            self._leave(shard, view.backup, number)
        self._shards[shard] = replace(view, generation=number, backup=node, filled=False)

    def let_go(self, node: int, number: int | None = None) -> None:
        """A node knows this view, or is dead: it writes nowhere any more that this view has taken from it."""
        if number is not None:
            self._known[node] = number

        def rest(holders: Mapping[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
            return {
                shard: (holder, since)
                for shard, (holder, since) in holders.items()
                if holder != node or (number is not None and number < since)
            }

        self.leaving, self.deserting = rest(self.leaving), rest(self.deserting)

    def knows(self, node: int, number: int) -> bool:
        """Whether a node has said that it knows this view, or a newer one."""
        return self._known.get(node, 0) >= number

    def _leave(self, shard: int, node: int, number: int) -> None:
        if self._shares_memory:
            self.leaving[shard] = (node, number)

    def fill(self, shard: int, sender: int, generation: int) -> bool:
        """The primary says that its backup has everything; whether that is news."""
        view = self._shards[shard]
        if view.filled or view.backup == NOBODY or (view.primary, view.generation) != (sender, generation):
            return False
        self._shards[shard] = replace(view, filled=True)
        return True
