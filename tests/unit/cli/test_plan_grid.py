"""What a plan says of a model that is cut over workers."""

from __future__ import annotations

import pytest

from shoal.cli.plan.grid import grid_manner
from shoal.cli.plan.manners import manner_of
from shoal.spec import Cluster, Job


@pytest.mark.parametrize(
    ("strategy", "memory", "said"),
    [
        ("sharded", "", "Gradients and the optimizer's state are cut over 2 workers, by size."),
        ("sharded:stage=1", "", "The optimizer's state is cut over 2 workers, by size."),
        ("sharded", "2GiB", "Parameters, gradients and the optimizer's state are cut over 2 workers, by size."),
        ("sharded:via=backend", "", "Parameters, gradients and the optimizer's state are cut over 2 workers"),
    ],
)
def test_parameters_that_all_find_in_memory_are_not_said_to_be_cut(strategy: str, memory: str, said: str) -> None:
    job = Job(target="toy.py", strategy=strategy, cluster=Cluster(workers=2, threads=1, memory=memory))
    meaning = grid_manner(job).meaning
    assert said in meaning
    assert ("Parameters lie once" in meaning) is ("Parameters, gradients" not in said)


def test_groups_over_which_a_model_is_cut_are_shown() -> None:
    strategy = "average:every=8,inside=mesh:shard:2,tensor:2"
    job = Job(target="toy.py", strategy=strategy, cluster=Cluster(workers=8, threads=1))
    manner = manner_of(job, [], {})
    assert manner.meaning.startswith("Each of 2 groups of workers in lockstep takes 8 steps on its own part")
    assert "Each group is a grid of 4 workers, shard=2 x tensor=2." in manner.meaning
    assert [point.worker for point in manner.grid] == list(range(8))
    assert [point.lane for point in manner.grid] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert manner.grid[5].coordinates == {"group": 1, "shard": 0, "tensor": 1}
