"""`on=`: where a job runs, as one writes it; and what cannot be spread over hosts."""

from __future__ import annotations

import pytest

from shoal.errors import SpecError
from shoal.spec import Cluster, Job


@pytest.mark.parametrize(
    ("on", "engine", "is_remote", "is_spread"),
    [
        ("local", "local", False, False),
        ("local:2", "local", True, True),
        ("ssh:a", "ssh", True, False),
        ("ssh:a,b", "ssh", True, True),
        ("hosts:list.txt", "hosts", True, True),
        ("join:1", "join", True, False),
        ("join:3", "join", True, True),
        ("ray", "ray", True, True),
        ("ray://head:10001,nodes=1", "ray", True, False),
        ("spark://head:7077", "spark", True, True),
    ],
)
def test_engines(on: str, engine: str, is_remote: bool, is_spread: bool) -> None:
    cluster = Cluster(on=on)
    assert (cluster.engine, cluster.is_remote, cluster.is_spread) == (engine, is_remote, is_spread)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"on": "moon"}, "on 'moon' is not known. Choose one of: hosts, join, k8s, local, mpi, ranks"),
        ({"on": "ssh:"}, "on=ssh: needs hosts, as in ssh:a,b"),
        ({"on": "hosts"}, "on=hosts needs a file that lists hosts"),
        ({"on": "local:none"}, "on=local must be a whole number of at least 1, found 'none'"),
        ({"on": "join"}, "on=join must be a whole number"),
        ({"interface": "eth0"}, "are about several hosts, but on=local; leave them out"),
        ({"on": "ssh:a,b", "ports": "many"}, "ports must be a range such as 20000-20100, found 'many'"),
    ],
)
def test_what_is_refused(wrong: dict[str, str], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        Cluster(**wrong)


@pytest.mark.parametrize(
    ("strategy", "means"),
    [
        ("ps", "ps:wire=tcp"),
        ("ps:servers=2,wire=tcp", "ps:servers=2,wire=tcp"),
        ("data", "data:via=chain"),
        ("data:via=tree", "data:via=tree"),
    ],
)
def test_what_auto_means_over_hosts(strategy: str, means: str) -> None:
    cluster = Cluster(workers=2, threads=1, on="ssh:a,b")
    assert Job(target="toy.py", strategy=strategy, cluster=cluster).strategy == means


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("data:via=arena", "sums inside one host"),
        ("ps:wire=memory", "works in one host's memory; use wire=tcp"),
        ("ps:servers=host", "works in one host's memory"),
        ("tensor:via=memory", "works in memory or with GPUs of one host; leave via out"),
        ("layer:via=memory", "works in memory or with GPUs of one host"),
    ],
)
def test_what_cannot_be_spread_is_refused(strategy: str, why: str) -> None:
    with pytest.raises(SpecError, match=f"Job: on=ssh:a,b spreads processes over hosts, but .*{why}"):
        Job(target="toy.py", strategy=strategy, cluster=Cluster(workers=2, threads=1, on="ssh:a,b"))
    Job(target="toy.py", strategy=strategy, cluster=Cluster(workers=2, threads=1, on="ssh:a"))


def test_inspections_stay_on_this_machine_and_scripts_keep_their_hosts() -> None:
    with pytest.raises(SpecError, match="to train, evaluate or predict, but purpose=inspect runs on this machine"):
        Job(target="toy.py", purpose="inspect", cluster=Cluster(on="ssh:a"))  # type: ignore[arg-type]
    Job(target="toy.py", purpose="script", cluster=Cluster(workers=2, on="ssh:a,b"))  # type: ignore[arg-type]
    for more, why in (
        ({"strategy": "ps"}, "would share one host's memory"),
        ({"hosts": "1:2"}, "would not notice"),
    ):
        cluster = Cluster(workers=2, on="ssh:a,b", hosts=more.pop("hosts", ""))
        with pytest.raises(SpecError, match=why):
            Job(target="toy.py", purpose="script", cluster=cluster, **more)  # type: ignore[arg-type]
    Job(target="toy.py", purpose="evaluate", cluster=Cluster(on="ssh:a,b"))  # type: ignore[arg-type]
