"""What stages of a pipeline need, and the split that keeps within it."""

from __future__ import annotations

import pytest

from shoal.errors import OutOfMemory
from shoal.layout.stage_memory import LinkSize, StageDemand, StageSizes, split_within
from shoal.spec import Mesh


def link(name: str, parameters: int = 10, activations: int = 3, **changes: int) -> LinkSize:
    return LinkSize(trained={name: parameters}, fixed={}, activations={f"{name} out": activations}, **changes)


LINKS = [link(name) for name in "abcdef"]


@pytest.mark.parametrize(
    ("schedule", "per_worker", "held"),
    [
        ("gpipe", 1, [8, 8, 8]),
        ("1f1b", 1, [3, 2, 1]),
        ("zero-bubble", 1, [3, 3, 3]),
        ("interleaved", 2, [8, 7, 5, 4, 3, 1]),
    ],
)
def test_micro_batches_on_their_way(schedule: str, per_worker: int, held: list[int]) -> None:
    mesh = Mesh(pipeline=3, schedule=schedule, per_worker=per_worker)
    assert StageDemand(mesh=mesh, microbatches=8).held() == held


def test_a_stage_holds_parameters_their_state_and_activations() -> None:
    sizes = StageSizes(LINKS, StageDemand(mesh=Mesh(pipeline=2), microbatches=4, kept=2))
    assert sizes(0, 0, 3) == 3 * 10 * (2 + 2) + 2 * 3 * 3
    assert sizes(1, 0, 3) == 3 * 10 * (2 + 2) + 1 * 3 * 3
    tied = [link("a"), link("b"), link("a")]
    assert StageSizes(tied, StageDemand(mesh=Mesh(pipeline=2), microbatches=4))(1, 0, 3) == 2 * 2 * 10 + 2 * 3


def test_recomputing_keeps_what_enters_for_each_micro_batch() -> None:
    links = [link("a"), link("b", entering=1), link("c", entering=1)]
    demand = StageDemand(mesh=Mesh(pipeline=3, schedule="gpipe"), microbatches=5, recomputes=True)
    assert StageSizes(links, demand)(1, 1, 3) == 2 * 2 * 10 + 2 * 3 + 5 * 1


def test_memory_moves_the_cut_where_it_must() -> None:
    """The cost wants two equal halves, but the first links are large."""
    links = [link("a", 60), link("b", 60), *LINKS[2:]]
    costs, crossings = [1.0] * 6, [0.0] * 6
    demand = {"mesh": Mesh(pipeline=2), "microbatches": 2}
    assert split_within(costs, crossings, links, StageDemand(**demand)) == (3, 3)
    assert split_within(costs, crossings, links, StageDemand(**demand, limit=253)) == (2, 4)
    with pytest.raises(OutOfMemory) as refused:
        split_within(costs, crossings, links, StageDemand(**demand, limit=200))
    told = str(refused.value)
    assert "memory allows each worker 200 B" in told and "one needs at least 215 B" in told, told
    assert "2 stages for 2 workers" in told and "use more workers" in told


def test_stages_of_one_worker_share_its_memory() -> None:
    """Two stages of each worker: a large link leaves the worker that has it a small one besides."""
    links = [link("a", 100, 0), *(link(name, 10, 0) for name in "bcdefgh")]
    mesh = Mesh(pipeline=2, schedule="interleaved", per_worker=2)
    counts = split_within([1.0] * 8, [0.0] * 8, links, StageDemand(mesh=mesh, microbatches=4, limit=250))
    assert 2 * (90 + 10 * (counts[0] + counts[2])) <= 250 and sum(counts) == 8
