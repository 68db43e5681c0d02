"""What `servers=host` can do, and what it refuses."""

from __future__ import annotations

import pytest

from shoal.errors import SpecError
from shoal.spec import Cluster, Job


def job(strategy: str, workers: int = 2) -> Job:
    return Job(target="task.py:task", strategy=strategy, cluster=Cluster(workers=workers))


@pytest.mark.parametrize("strategy", ["ps:servers=host", "ps:servers=host,hosts=2,agree=ring"])
def test_copies_in_lockstep(strategy: str) -> None:
    assert job(strategy).spec.num_replicas == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("sync=asp", "agree=allreduce .* sync=bsp only, found sync=asp"),
        ("agree=ring,sync=ssp:2", "agree=ring .* sync=bsp only, found sync=ssp:2"),
        ("agree=scatter-sum", "agree=scatter-sum .* sync=asp only, found sync=bsp"),
        ("hosts=3", "divides 2 workers into hosts=3 groups; use 2 at most"),
        ("replicas=1", "needs replicas=0, found 1"),
        ("wire=tcp", "needs wire=memory, found tcp"),
        ("push=parameters", "needs push=gradients, found parameters"),
        ("via=ring", "needs via=direct, found ring"),
        ("shards=4", "needs shards=auto, found 4"),
    ],
)
def test_what_does_not_fit_is_refused(settings: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        job(f"ps:servers=host,{settings}")
