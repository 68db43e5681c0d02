"""All that a coordinator must not forget: what it saves before it tells, and what its successor starts from."""

from __future__ import annotations

from typing import Any

from shoal.coordinator.adjusting import Adjuster
from shoal.coordinator.controls import Controls
from shoal.coordinator.dealing import SlotDeal
from shoal.coordinator.members import SERVER, WORKER, Members, Seat
from shoal.coordinator.moves import ShardMoves
from shoal.coordinator.plan import JobPlan
from shoal.coordinator.shards import ShardTable
from shoal.ps.messages import View


class JobState:
    """Members, holders of shards, and decisions under way, as of the view to come."""

    def __init__(self, plan: JobPlan, saved: dict[str, Any], now: float) -> None:
        self.number: int = saved.get("number", 0)
        """Of the newest view that is saved."""
        self.members = Members(saved.get("members", ()), saved.get("gone", ()), now)
        rows = saved.get("shards")
        self.table: ShardTable | None = None
        """None until all servers have come."""
        if rows is not None:
            self.table = ShardTable.from_rows(
                rows,
                plan.shard_bytes,
                saved["leaving"],
                shares_memory=plan.shares_memory,
                deserting=saved["deserting"],
            )
        self.moves = ShardMoves(plan.replicas, saved.get("targets"), outlives_servers=plan.outlives_servers)
        self.controls = Controls(plan.num_shards, *saved.get("controls", ()))
        self.wanted: dict[str, int] = saved.get("wanted", {SERVER: plan.servers, WORKER: plan.workers})
        """How many of each role there should be."""
        self.done_ranks = set(saved.get("done_ranks", ()))
        """Workers that have trained on all that was their own."""
        self.deal = None if plan.leased else SlotDeal(plan.slots, *saved.get("deal", ()))
        """Who fills which slot; None where cells are leased."""
        self.settings: dict[str, Any] = saved.get("settings", {})
        self.adjuster = Adjuster(plan, saved.get("adjusting", {}), now)

    @property
    def coming(self) -> int:
        """The number of the view to come: the generation of whatever changes now."""
        return self.number + 1

    def seats(self) -> set[Seat]:
        """The seats that are wanted filled."""
        workers = set(range(self.wanted[WORKER])) - self.done_ranks
        return {(SERVER, rank) for rank in range(self.wanted[SERVER])} | {(WORKER, rank) for rank in workers}

    def plain(self) -> dict[str, Any]:
        """This state as the view to come will find it, for a store."""
        return {
            "number": self.coming,
            "members": self.members.rows(),
            "gone": self.members.gone,
            "shards": None if self.table is None else self.table.rows(),
            "leaving": {} if self.table is None else self.table.leaving,
            "deserting": {} if self.table is None else self.table.deserting,
            "targets": self.moves.targets,
            "controls": self.controls.plain(),
            "wanted": self.wanted,
            "done_ranks": sorted(self.done_ranks),
            "deal": () if self.deal is None else self.deal.plain(),
            "settings": self.settings,
            "adjusting": self.adjuster.plain(),
        }

    def view(self, term: int) -> View:
        """What members are told of it."""
        assert self.table is not None
        moving = list(self.moves.announced)
        deal = {} if self.deal is None else {"deal": self.deal.told()}
        return View(
            term=term,
            number=self.number,
            shards=self.table.rows(),
            addresses=self.members.addresses,
            workers=self.members.seats(WORKER),
            settings={**self.settings, **deal, **({"moving": moving} if moving else {})},
        )
