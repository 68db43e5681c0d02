"""What a run asks of a Ray cluster."""

from __future__ import annotations

import pytest

from shoal.errors import LaunchError, SpecError
from shoal.launch.engines.ray_plan import (
    RayNode,
    RayWish,
    bundle_of_more,
    bundles_to_wait_for,
    plan_bundles,
    too_little,
)
from shoal.spec import Cluster

BIG = RayNode(name="big", address="10.0.0.1", has={"CPU": 8, "GPU": 2, "fast": 1})
SMALL = RayNode(name="small", address="10.0.0.2", has={"CPU": 2})


@pytest.mark.parametrize(
    ("written", "wish"),
    [
        ("", RayWish()),
        ("auto", RayWish()),
        ("10.0.0.1:6379", RayWish(address="10.0.0.1:6379")),
        ("//head:10001,nodes=2", RayWish(address="ray://head:10001", nodes=2)),
        ("resources=fast:1+big:0.5,wait=300", RayWish(resources={"fast": 1.0, "big": 0.5}, wait_s=300.0)),
    ],
)
def test_what_stands_behind_ray(written: str, wish: RayWish) -> None:
    assert RayWish.parse(written) == wish


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("nodes=none", r"on=ray:nodes=none is not understood \(nodes=none\); write for example ray:nodes=2"),
        ("resources=fast:many", "is not understood"),
        ("node=2", "ray key 'node' is not known. Did you mean 'nodes'"),
    ],
)
def test_what_is_not_understood(written: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        RayWish.parse(written)


@pytest.mark.parametrize(
    ("cluster", "wish", "bundles"),
    [
        (Cluster(workers=2), RayWish(), [{"CPU": 1}, {"CPU": 1}]),
        (Cluster(workers=6), RayWish(), [{"CPU": 4}, {"CPU": 2}]),
        (Cluster(workers=3, threads=2), RayWish(), [{"CPU": 4}, {"CPU": 2}]),
        (Cluster(workers=4), RayWish(nodes=1), [{"CPU": 4}]),
        (Cluster(workers=2, device="cuda"), RayWish(), [{"CPU": 2, "GPU": 2}]),
        (Cluster(workers=2), RayWish(resources={"fast": 1}), [{"CPU": 2, "fast": 1}]),
    ],
)
def test_a_bundle_for_each_node(cluster: Cluster, wish: RayWish, bundles: list[dict[str, float]]) -> None:
    assert plan_bundles([SMALL, BIG], wish, cluster) == bundles


@pytest.mark.parametrize(
    ("cluster", "wish", "asked"),
    [
        (Cluster(workers=11), RayWish(), "1 CPU for each of 11 workers"),
        (Cluster(workers=3, device="cuda"), RayWish(), "1 CPU and 1 GPU for each of 3 workers"),
        (Cluster(workers=2), RayWish(nodes=2, resources={"fast": 1}), "2 workers, 1 fast on each node, 2 nodes"),
    ],
)
def test_too_little_is_named_with_what_is_there(cluster: Cluster, wish: RayWish, asked: str) -> None:
    with pytest.raises(
        LaunchError, match=rf"asks for .*{asked}, but the Ray cluster has small 2 CPU.*; big 8 CPU"
    ):
        plan_bundles([SMALL, BIG], wish, cluster)


def test_what_others_use_is_named() -> None:
    text = too_little([SMALL], RayWish(), Cluster(workers=2), {"CPU": 1})
    assert "has small 2 CPU, of which 1 CPU were free within 8 s; ask for less" in text


def test_more_nodes_than_workers_are_refused() -> None:
    with pytest.raises(SpecError, match="nodes=3, but there are only 2 workers"):
        plan_bundles([SMALL, BIG], RayWish(nodes=3), Cluster(workers=2))


def test_a_cluster_that_grows_is_asked_for_all() -> None:
    assert bundles_to_wait_for(RayWish(nodes=2, wait_s=300), Cluster(workers=3)) == [{"CPU": 2}, {"CPU": 1}]


def test_one_more_node_must_have_room_for_its_share() -> None:
    wish = RayWish(resources={"fast": 1.0})
    cluster = Cluster(workers=6, threads=2, on="ray")
    assert bundle_of_more(wish, cluster, hosts=3) == {"CPU": 4, "fast": 1.0}
    assert bundle_of_more(wish, cluster, hosts=9) == {"CPU": 2, "fast": 1.0}
