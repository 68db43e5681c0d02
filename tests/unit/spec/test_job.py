"""Jobs and clusters: plain data, checked when made."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import SpecError
from shoal.spec import Cluster, Data, Job

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    args=st.dictionaries(st.text(min_size=1), plain, max_size=3),
    workers=st.integers(1, 8),
    spares=st.integers(0, 3),
    more_slots=st.none() | st.integers(0, 8),
    via=st.sampled_from(Data.VIA),
)
def test_a_job_survives_json(args: dict, workers: int, spares: int, more_slots: int | None, via: str) -> None:
    job = Job(
        target="digits.py:task",
        args=args,
        strategy=f"data:via={via}",
        cluster=Cluster(workers=workers, spares=spares if via == "arena" else 0),
        slots=None if more_slots is None else workers + more_slots,
        overrides={"epochs": 3},
        options={"argv": ["--fast"]},
    )
    again = Job.from_json(job.to_json())
    assert again == job
    assert again.num_slots == workers + (more_slots or 0)
    assert again.spec == Data(via=via)


def test_strategies_are_kept_in_one_spelling() -> None:
    assert Job(target="a.py", strategy="data:journal=on,via=arena").strategy == "data:via=arena"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target": ""}, "target is empty"),
        ({"args": {"made": object()}}, "args must be plain data"),
        ({"options": {"chosen": {1, 2}}}, "options must be plain data"),
        ({"overrides": {"lr": 0.1}}, "'lr' cannot be overridden; only batch_size, epochs"),
        ({"purpose": "dance"}, "purpose 'dance' is not known.*train"),
        ({"numerics": "float16"}, "numerics 'float16' is not known"),
        ({"slots": 2, "cluster": Cluster(workers=3)}, "slots=2 is fewer than workers=3"),
        ({"slots": 0}, "slots must be a whole number of at least 1"),
        ({"slots": 5, "cluster": Cluster(workers=2), "strategy": "data:shares=1+3"}, "2 workers and 5 slots"),
        ({"strategy": "dat"}, "Did you mean 'data'"),
        ({"strategy": "data:shares=speed", "cluster": Cluster(device="cuda")}, "use device=cpu, or shares=even"),
        ({"cluster": Cluster(device="cuda+cpu", workers=2)}, "very different speeds.* use ps:sync=asp"),
        (
            {"strategy": "data:shares=speed", "cluster": Cluster(device="cuda+cpu", workers=2), "slots": 4},
            "one part of a batch, but slots=4",
        ),
        (
            {"strategy": "ps:servers=host", "cluster": Cluster(device="cuda", workers=2)},
            "in the host's memory, but device=cuda",
        ),
        ({"on_failure": "pray"}, "on_failure 'pray' is not known.*auto, replace, restart, shrink, stop"),
        (
            {"on_failure": "restart", "cluster": Cluster(spares=1)},
            "spares=1 take the places .* use on_failure=replace",
        ),
        ({"max_failures": -1}, "max_failures must be a whole number of at least 0"),
        ({"on_failure": "shrink", "strategy": "data:via=ring"}, "on_failure=shrink .* use data:via=arena"),
        ({"on_failure": "shrink", "strategy": "ps"}, "use replace or stop"),
        (
            {"on_failure": "shrink", "strategy": "average:after=4"},
            "on_failure=shrink .* with after=4 each worker's model lies in its process alone; leave after=4 out",
        ),
        (
            {"cluster": Cluster(workers="2:4"), "strategy": "average:via=sockets"},
            "workers=2:4 .* with via=sockets .* leave via=sockets out",
        ),
        (
            {"cluster": Cluster(workers="2:4"), "strategy": "average:inside=data,groups=2"},
            "workers=2:4 .* with inside=data .* leave inside=data out",
        ),
        (
            {"cluster": Cluster(workers="2:4", on="local:2"), "strategy": "average"},
            "workers=2:4 .* with on=local:2 .* use CPUs of one host",
        ),
        (
            {"cluster": Cluster(workers="2:4", device="cuda"), "strategy": "average"},
            "workers=2:4 .* with device=cuda .* use CPUs of one host",
        ),
        (
            {"cluster": Cluster(workers="1:4"), "strategy": "ps:via=ring"},
            "workers=1:4 .* add up what they push among themselves; use via=direct; or give a number",
        ),
        (
            {"cluster": Cluster(workers="1:4"), "strategy": "ps:push=parameters"},
            "workers=1:4 .* trained by it alone; use sync=asp; or give a number",
        ),
        (
            {"cluster": Cluster(workers=3), "strategy": "ps:sync=quorum:1/2"},
            "is of 2 slots, but there are 3, at least one for each worker; write quorum:k/3",
        ),
        ({"cluster": Cluster(workers="1:40"), "strategy": "ps:sync=asp"}, "begins with 1 may have up to 9"),
        ({"cluster": Cluster(workers="1:4"), "strategy": "data:journal=off"}, "workers=1:4 .* its journal"),
        ({"cluster": Cluster(workers="1:4"), "purpose": "evaluate"}, "workers=1:4 is for training"),
        ({"cluster": Cluster(workers="1:4"), "slots": 3}, "slots=3 is fewer than workers=4"),
    ],
)
def test_what_cannot_be_is_refused_at_once(fields: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Job(**{"target": "digits.py:task", **fields})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"job"', "{}", '{"target": "a.py", "cluster": 3}'])
def test_foreign_text_is_no_job(text: str) -> None:
    with pytest.raises(SpecError, match="not a job written by Shoal"):
        Job.from_json(text)


def test_fields_of_a_later_version_are_left_out() -> None:
    values = json.loads(Job(target="a.py").to_json()) | {"colour": "blue"}
    assert Job.from_json(json.dumps(values)) == Job(target="a.py")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"workers": 0}, "workers must be a whole number of at least 1, found 0"),
        ({"workers": True}, "found True"),
        ({"workers": "few"}, "a number, or limits as in 1:4, found 'few'"),
        ({"workers": "1:"}, "found '1:'"),
        ({"workers": "0:2"}, "workers must be a whole number of at least 1, found 0"),
        ({"workers": "4:1"}, "lower limit above the upper; write 1:4"),
        ({"workers": 5, "min_workers": 1, "max_workers": 4}, "workers=5 is not between"),
        ({"min_workers": 1}, "max_workers must be a whole number"),
        ({"workers": 2.0}, "found 2.0"),
        ({"spares": -1}, "spares must be a whole number of at least 0"),
        ({"threads": 0}, "threads must be"),
        ({"port": 70000}, "between 1 and 65535, found 70000"),
        ({"on": "moon"}, "on 'moon' is not known.*local"),
    ],
)
def test_clusters_that_cannot_be(fields: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Cluster(**fields)


def test_workers_within_limits() -> None:
    cluster = Cluster(workers="1:4")
    assert (cluster.workers, cluster.min_workers, cluster.max_workers, cluster.places) == (1, 1, 4, 4)
    assert cluster.is_elastic and cluster.written_workers == "1:4"
    job = Job(target="a.py", cluster=cluster)
    assert job.num_slots == 4 and Job.from_json(job.to_json()) == job
    assert Cluster(workers="3") == Cluster(workers=3) and not Cluster(workers=3).is_elastic
    assert Cluster(workers=3).places == 3 and Cluster(workers=3).written_workers == "3"


def test_threads_are_given_or_from_the_environment_or_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert Cluster(workers=2, threads=5).threads_per_worker == 5
    assert Cluster(workers=2).threads_per_worker == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert Cluster(workers=2).threads_per_worker == 4
    assert Cluster(workers=99).threads_per_worker == 1


@pytest.mark.parametrize(
    ("on_failure", "checkpoint", "replaces", "restarts"),
    [
        ("auto", "none", True, False),
        ("auto", "every=9", True, True),
        ("replace", "every=9", True, False),
        ("shrink", "every=9", True, False),
        ("restart", "none", False, True),
        ("stop", "every=9", False, False),
    ],
)
def test_what_follows_a_death(on_failure: str, checkpoint: str, replaces: bool, restarts: bool) -> None:
    job = Job(target="digits.py", on_failure=on_failure, checkpoint=checkpoint)
    assert (job.replaces, job.restarts) == (replaces, restarts)


@pytest.mark.parametrize(
    ("workers", "strategy", "slots"),
    [
        ("2:8", "ps", 8),
        ("2:8", "ps:sync=ssp:3", 8),
        ("2:8", "ps:sync=asp", 2),
        ("2:8", "ps:sync=quorum:6/8", 8),
        (2, "ps:sync=quorum:2/3", 3),
        (2, "ps:sync=alternate:2", 2),
    ],
)
def test_where_slots_are_dealt_there_are_as_many_as_workers_may_fill(
    workers: int | str, strategy: str, slots: int
) -> None:
    job = Job(target="digits.py", strategy=strategy, cluster=Cluster(workers=workers))
    assert job.num_slots == slots and job.cluster.workers == 2


def test_an_asynchronous_run_takes_more_slots_than_it_has_workers() -> None:
    job = Job(target="digits.py", strategy="ps:sync=ssp:2", cluster=Cluster(workers=2), slots=5)
    assert job.conduct.fills == (range(2), range(2, 5))
