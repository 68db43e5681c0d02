"""What is asked for as privacy: how it is written, and what does not go together with it."""

from __future__ import annotations

import pytest

from shoal.errors import SpecError
from shoal.observe.report import command
from shoal.spec import Cluster, Job
from shoal.spec.privacy import Privacy

FEDERATED = "average:clients=12,share=0.5,partition=own"


@pytest.mark.parametrize("text", ["epsilon=8,delta=1e-06,clip=0.5", "noise=1.1,key=7", "epsilon=0.123456789012"])
def test_what_is_written_is_read_again(text: str) -> None:
    privacy = Privacy.parse(text)
    assert privacy is not None and Privacy.parse(str(privacy)) == privacy


def test_none_is_no_privacy() -> None:
    assert Privacy.parse("none") is None and Job(target="a.py").protection is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("clip=1", "neither epsilon nor noise"),
        ("epsilon=0", "epsilon must be a number above 0"),
        ("epsilon=eight", "epsilon must be a number"),
        ("epsilon=8,delta=1", "delta must be between"),
        ("epsilon=8,epsilon=9", "twice"),
        ("epsilom=8", "Did you mean 'epsilon'"),
        ("noise=1,key=-1", "key must be"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        Privacy.parse(text)


def test_a_job_has_a_key_of_its_own_and_keeps_it() -> None:
    jobs = [Job(target="a.py", privacy="noise=1") for _ in range(2)]
    keys = [job.protection.key for job in jobs if job.protection is not None]
    assert len(set(keys)) == 2
    again = Job.from_json(jobs[0].to_json())
    assert again.protection == jobs[0].protection
    assert str(keys[0]) not in command(jobs[0]) and "noise=1" in command(jobs[0])


@pytest.mark.parametrize("strategy", ["data", "data:via=ring", "data:partition=relay", FEDERATED])
def test_what_adds_up_once_can_have_it(strategy: str) -> None:
    assert Job(target="a.py", strategy=strategy, cluster=Cluster(workers=2), privacy="noise=1").protection


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"strategy": "ps"}, "no one sum over samples or clients"),
        ({"strategy": "sharded"}, "no one sum over samples or clients"),
        ({"strategy": "average"}, "has no clients"),
        ({"strategy": f"{FEDERATED},clip=norm:1"}, "privacy's own clip"),
        ({"strategy": "data:shares=speed"}, "shares=speed"),
        ({"strategy": "data:batchnorm=sync"}, "batchnorm=sync"),
        ({"precision": "bf16"}, "precision=bf16"),
        ({"compile": True}, "form=compile"),
        ({"recompute": True}, "recompute=on"),
        ({"overrides": {"skip_loss_below": 0.1}}, "skip_loss_below"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        Job(target="a.py", cluster=Cluster(workers=2), privacy="noise=1", **changes)  # type: ignore[arg-type]


def test_two_workers_keep_nothing_from_each_other() -> None:
    with pytest.raises(SpecError, match="at least 3 workers"):
        Job(target="a.py", strategy=f"{FEDERATED},secure=on", cluster=Cluster(workers=2))
    Job(target="a.py", strategy=f"{FEDERATED},secure=on", cluster=Cluster(workers=3))
    with pytest.raises(SpecError, match="with clients"):
        Job(target="a.py", strategy="average:secure=on", cluster=Cluster(workers=3))
