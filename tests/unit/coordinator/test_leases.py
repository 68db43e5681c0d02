"""Leases: whatever is lost, repeated or late, every cell is trained on and no two living workers share one."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordinator.leases import Leases
from shoal.ledger.cells import CellSet
from shoal.ps.messages import Lease


def test_cells_are_given_in_order_and_asking_again_changes_nothing():
    leases = Leases(5)
    assert leases.ask(1, wanted=2, done=[], held=[]) == [0, 1]
    assert leases.ask(1, wanted=2, done=[], held=[]) == [0, 1]
    assert leases.ask(2, wanted=1, done=[], held=[]) == [2]
    assert leases.ask(1, wanted=2, done=[0], held=[1]) == [1, 3]
    assert leases.committed == 1


def test_what_came_back_is_given_first():
    leases = Leases(6)
    leases.ask(1, wanted=3, done=[], held=[])
    leases.ask(2, wanted=1, done=[], held=[])
    assert leases.release(1) == [0, 1, 2]
    assert leases.ask(2, wanted=3, done=[3], held=[]) == [0, 1, 2]
    assert leases.release(1) == []


def test_a_cell_that_every_shard_has_is_not_given_again():
    leases = Leases(4)
    leases.ask(1, wanted=3, done=[], held=[])
    leases.release(1)
    leases.confirm(CellSet([0, 2]))
    assert leases.committed == 2
    assert leases.ask(2, wanted=4, done=[], held=[]) == [1, 3]


def test_cells_that_do_not_exist_are_ignored():
    leases = Leases(2)
    assert leases.ask(1, wanted=0, done=[-1, 2, 99], held=[-5, 7]) == []
    assert leases.committed == 0


def test_after_a_takeover_nothing_is_given_before_everybody_has_spoken():
    leases = Leases(6, settled=False)
    assert leases.ask(1, wanted=2, done=[0], held=[3]) == [3]
    assert leases.ask(2, wanted=2, done=[], held=[3, 4]) == [4]
    leases.settle(CellSet([1, 4]))
    assert leases.committed == 3
    assert leases.ask(2, wanted=2, done=[], held=[4]) == [2, 5]
    assert leases.ask(1, wanted=2, done=[], held=[3]) == [3]


@dataclass
class Trainer:
    """A worker as the protocol allows it to be, with the newest lease it has heard."""

    node: int
    doing: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)

    def hear(self, lease: Lease) -> None:
        self.doing = [cell for cell in lease.cells if cell not in self.done]

    def finish_one(self, applied: list[int]) -> None:
        if self.doing:
            cell = self.doing.pop(0)
            self.done.append(cell)
            if cell not in applied:  # The shards know a cell that they have.
                applied.append(cell)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask", "ask", "answer lost", "request lost", "repeat", "finish", "finish", "die", "report"]
        ),
        st.integers(0, 2),
    ),
    max_size=120,
)


@settings(max_examples=300, deadline=None)
@given(actions=ACTIONS, num_cells=st.integers(1, 12))
def test_any_interleaving_trains_every_cell_once(actions, num_cells):
    leases, applied, next_node = Leases(num_cells), [], 3
    trainers = [Trainer(node) for node in range(3)]
    requests: dict[int, tuple[list[int], list[int]]] = {}

    def ask(trainer: Trainer, done: list[int], held: list[int]) -> Lease:
        cells = leases.ask(trainer.node, wanted=2, done=done, held=held)
        given = [leases.held_by(other.node) for other in trainers]
        assert sum(len(held) for held in given) == len({cell for held in given for cell in held})
        return Lease(term=1, ticket=0, cells=cells, committed=leases.committed, over=leases.complete)

    for action, who in actions:
        trainer = trainers[who]
        if action in ("ask", "answer lost"):
            requests[trainer.node] = (list(trainer.done), list(trainer.doing))
            lease = ask(trainer, *requests[trainer.node])
            if action == "ask":
                trainer.hear(lease)
        elif action == "repeat" and trainer.node in requests:
            ask(trainer, *requests[trainer.node])
        elif action == "finish":
            trainer.finish_one(applied)
        elif action == "die":
            leases.release(trainer.node)
            trainers[who] = Trainer(next_node)
            next_node += 1
        elif action == "report":
            leases.confirm(CellSet(applied))
        assert leases.committed <= len(applied)
    for _ in range(2 * num_cells + 3):
        for trainer in trainers:
            trainer.hear(ask(trainer, trainer.done, trainer.doing))
            trainer.finish_one(applied)
            trainer.finish_one(applied)
    assert sorted(applied) == list(range(num_cells))
    assert leases.complete


def test_a_worker_is_told_when_there_were_fewer_cells_than_it_wanted(job):
    assert not job.ask(20, wanted=8).dry
    answer = job.ask(21, wanted=4)
    assert (answer.cells, answer.dry, answer.over) == ([8, 9], True, False)
    assert not job.ask(21, wanted=2).dry


def test_a_worker_that_has_trained_on_nothing_hears_the_newest_loss(job):
    assert job.ask(20).loss == []
    job.ask(20, loss=(0.5,))
    assert job.ask(21).loss == [0.5]
    assert job.ask(21, loss=(0.25,)).loss == job.ask(20).loss == [0.25]
