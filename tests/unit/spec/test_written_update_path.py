"""The written form of a worker's update path, and what cannot go together."""

from __future__ import annotations

import pytest

from shoal.errors import SpecError
from shoal.spec import Cluster, Job, parse_strategy
from shoal.spec.update_path import Pooling


@pytest.mark.parametrize(
    ("text", "pooling"),
    [
        ("threads:2,ms:50,count:8", Pooling(threads=2, ms=50, count=8)),
        ("count:3", Pooling(threads=1, ms=0, count=3)),
        ("ms:20", Pooling(threads=1, ms=20, count=8)),
    ],
)
def test_a_pool_may_be_written_in_part(text: str, pooling: Pooling) -> None:
    assert Pooling.parse(text) == pooling


@pytest.mark.parametrize(
    "strategy",
    [
        "ps:via=ring,leader=rotate",
        "ps:via=router:3,servers=2,wire=tcp",
        "ps:sync=asp,pool=threads:2,ms:50,count:8",
        "ps:sync=ssp:0,via=ring",
    ],
)
def test_what_goes_together(strategy: str) -> None:
    assert Job(target="a.py", strategy=strategy, cluster=Cluster(workers=3)).spec == parse_strategy(strategy)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("ps:via=ring,sync=asp", "via=ring adds up the gradients of one step, which needs sync=bsp.*sync=asp"),
        ("ps:via=router:2,push=parameters,every=2", "needs sync=bsp and push=gradients, found .* push=parameters"),
        ("ps:via=router:4", "divides 3 workers into 4 groups; use router:3 at most"),
        ("ps:leader=rotate", "add via=ring or via=router:N"),
        ("ps:pool=count:4", "needs sync=asp and push=gradients, found sync=bsp"),
        ("ps:sync=asp,push=parameters,pool=count:4", "found sync=asp and push=parameters"),
        ("ps:sync=asp,pool=threads:0", "pool: threads must be a whole number of at least 1, found 0"),
        ("ps:sync=asp,pool=count:0", "pool: count must be a whole number of at least 1, found 0"),
    ],
)
def test_what_contradicts_itself_is_refused(strategy: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Job(target="a.py", strategy=strategy, cluster=Cluster(workers=3))
