"""What a plan says of a model that is cut over workers."""

from __future__ import annotations

import pytest

from shoal.cli.plan.grid import grid_manner
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
