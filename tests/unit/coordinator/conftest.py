"""A job around a coordinator: members are only numbers that say what members say; time is a number too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from shoal.coordinator import Coordinator, JobPlan, MemberOrder, MemoryStore
from shoal.coordinator.members import Seat
from shoal.ledger.cells import CellSet
from shoal.ps.between_servers import Filled
from shoal.ps.messages import Join, Lease, LeaseRequest, PsMessage, Report, ShardView, View

PLAN = JobPlan(
    num_shards=4,
    shard_bytes=(100, 100, 100, 100),
    owners=(0, 0, 1, 1),
    backups=(1, 1, 0, 0),
    servers=2,
    workers=2,
    num_cells=10,
    leased=True,
    adjust=(),
)


@dataclass
class Job:
    """Servers are nodes 10, 11, ...; workers 20, 21, ... unless a test says otherwise."""

    plan: JobPlan
    store: MemoryStore = field(default_factory=MemoryStore)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.plan, self.store, self.now)

    def formed(self) -> Job:
        """All members of the plan have joined, and nothing is left to read."""
        for rank in range(self.plan.servers):
            self.join(10 + rank, "server", rank)
        for rank in range(self.plan.workers):
            self.join(20 + rank, "worker", rank)
        self.clear()
        return self

    def successor(self) -> Job:
        """The coordinator that takes over from this one's store."""
        return Job(self.plan, self.store, self.now)

    def say(self, sender: int, message: PsMessage) -> None:
        self.coordinator.on_message(sender, message, self.now)

    def join(self, node: int, role: str, rank: int, host: int = 0) -> None:
        self.say(node, Join(node=node, role=role, rank=rank, address=f"tcp://127.0.0.1:{node}", host=host))

    def report(self, node: int, *, view: int | None = None, **facts: Any) -> None:
        role = "server" if node < 20 else "worker"
        number = self.view.number if view is None else view
        self.say(node, Report(node=node, role=role, rank=node % 10, view=number, facts=facts))

    def report_shards(self, cells: range, *, view: int | None = None) -> None:
        """Every primary reports that its shards have these cells."""
        for node in {shard.primary for shard in self.shards}:
            mine = [number for number, shard in enumerate(self.shards) if shard.primary == node]
            facts = {"cells": CellSet(cells).to_plain(), "tally": {"applied": len(cells)}}
            self.report(node, view=view, shards=dict.fromkeys(mine, facts))

    def lose(self, node: int, seat: Seat | None = None) -> None:
        self.coordinator.on_lost(node, self.now, seat)

    def living(
        self, *nodes: int, coming: dict[int, Seat] | None = None, left: dict[int, int] | None = None
    ) -> None:
        """The supervisor says who lives: these members, and those who have not joined yet; and who has left."""
        seats = {node: ("server" if node < 20 else "worker", node % 10) for node in nodes}
        self.coordinator.on_living({**seats, **(coming or {})}, self.now, left)

    def fill(self, *shards: int) -> None:
        """The primaries of these shards say that their backups are filled."""
        for number in shards:
            shard = self.shards[number]
            self.say(shard.primary, Filled(shard=number, generation=shard.generation, index=0))

    def ask(
        self,
        node: int,
        *,
        wanted: int = 1,
        done: tuple[int, ...] = (),
        held: tuple[int, ...] = (),
        loss: tuple[float, ...] = (),
    ) -> Lease:
        request = LeaseRequest(
            node=node, rank=node % 10, ticket=1, wanted=wanted, done=list(done), held=list(held), loss=list(loss)
        )
        self.say(node, request)
        answers = [message for to, message in self.coordinator.outbox if to == node and isinstance(message, Lease)]
        return answers[-1]

    def pass_time(self, seconds: float, *, speaking: tuple[int, ...] = ()) -> None:
        """Time passes in ticks; these members go on reporting."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.25)
            for node in speaking:
                self.report(node)
            self.coordinator.on_tick(self.now)

    @property
    def view(self) -> View:
        assert self.coordinator.view is not None
        return self.coordinator.view

    @property
    def shards(self) -> list[ShardView]:
        return self.view.shard_views

    def told(self, node: int, kind: type[PsMessage] = View) -> list[Any]:
        return [message for to, message in self.coordinator.outbox if to == node and isinstance(message, kind)]

    def orders(self) -> list[MemberOrder]:
        orders = list(self.coordinator.orders)
        self.coordinator.orders.clear()
        return orders

    def decisions(self, what: str) -> list[dict[str, Any]]:
        return [event for event in self.coordinator.events if event["what"] == what]

    def clear(self) -> None:
        self.coordinator.outbox.clear()
        self.coordinator.orders.clear()
        self.coordinator.events.clear()


@pytest.fixture
def make_job() -> Callable[..., Job]:
    """Makes a job of the usual plan, with changes."""
    return lambda **changes: Job(replace(PLAN, **changes))


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Job:
    """The usual job: 2 servers with 2 shards each and copies of the other's, 2 workers, 10 cells; formed."""
    return make_job().formed()
