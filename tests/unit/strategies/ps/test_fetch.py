"""A worker reads the copy that counts, and never one that a new holder is about to fill."""

from __future__ import annotations

import torch
from torch import nn

from shoal.model.replica import Replica
from shoal.ps.messages import Push
from shoal.spec import ParameterServer, Task, World
from shoal.strategies.ps.puller import OwnValues, SharedFetch, Whereabouts
from shoal.strategies.ps.served import Served

OLD, NEW = 0, 1
"""The copy of a primary that died, and that of its backup, which counts now."""


class Bystander:
    """A worker that has been told of one update, and hears that another copy counts only when it looks."""

    def __init__(self) -> None:
        task = Task(
            model=lambda: nn.Linear(4, 3),
            loss=nn.functional.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
            train=[0],
            batch_size=1,
            epochs=1,
        )
        spec = ParameterServer(sync="asp")  # which marks what it may have to go back to
        self.served = Served.open(spec, Replica(task), World(), slots=1, workers=1)
        self.stores = {copy: self.served.make_values(0, copy) for copy in (OLD, NEW)}
        for store in self.stores.values():
            store.initialise()
        self.own = OwnValues(self.served.memory, self.served.moving)
        self.copy, self.heard = OLD, 0
        whereabouts = Whereabouts(copy_of=lambda shard: self.copy, updates_of=lambda shard: 1, hear=self._hear)
        self.fetch = SharedFetch(self.served.memory, self.own, whereabouts)

    def _hear(self) -> None:
        self.copy, self.heard = NEW, self.heard + 1

    def update(self, copy: int) -> None:
        """The first update reaches this copy."""
        for view in self.served.memory.views("gradients/0"):
            view.fill_(1.0)
        self.served.memory.touched(0).fill_(1)
        push = Push(
            shard=0,
            generation=1,
            origin=9,
            sequence=1,
            clock_of=0,
            clock=1,
            cells=[0],
            based_on=0,
            weight=1.0,
            loss=1.0,
        )
        self.stores[copy].step([push], scale=1.0, lr_scale=1.0, loss=1.0, last=True)

    def values(self, copy: int) -> torch.Tensor:
        return self.served.memory.live(0, copy)[0].clone()


def test_a_copy_that_lacks_what_was_told_is_not_read() -> None:
    worker = Bystander()
    worker.update(NEW)
    assert not worker.values(OLD).equal(worker.values(NEW))
    worker.fetch.fetch_block(0, 0)
    assert worker.heard == 1
    assert worker.own.blocks[0][0].equal(worker.values(NEW))


def test_what_was_read_while_a_new_holder_took_the_copy_does_not_count() -> None:
    worker = Bystander()
    worker.update(OLD)
    worker.update(NEW)
    seen: list[int] = []

    def take(copies: list[int]) -> torch.Tensor:
        seen.extend(copies)
        if copies == [OLD]:
            worker.served.make_values(0, OLD).initialise()
        return worker.values(copies[0])

    taken = worker.fetch.read([0], take)
    assert seen == [OLD, NEW]
    assert taken.equal(worker.values(NEW))


def test_going_back_is_a_change_that_readers_are_told_of() -> None:
    worker = Bystander()
    store = worker.stores[OLD]
    store.mark()
    worker.update(OLD)
    assert store.rollback()
    assert worker.served.memory.updates(OLD)[0] == 2
