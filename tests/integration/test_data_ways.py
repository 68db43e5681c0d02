"""Samples that are loaded ahead, and samples that one worker holds for all: the same bits as ever."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_tasks import STEP_S

from helpers.training import Train
from shoal.errors import ShoalError
from shoal.launch.owner import ZygoteProcess
from shoal.roles.process.timeline import read_timeline
from shoal.spec import Cluster, Job

TASKS = Path(__file__).with_name("data_tasks.py")
LONG = pytest.mark.long
WAYS = [
    {"workers": 2},
    {"workers": 2, "strategy": "data:via=ring"},
    {"workers": 2, "strategy": "ps:servers=2"},
    {"workers": 1, "slots": 1, "strategy": "ps:sync=asp"},
]


@pytest.fixture
def train(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(TASKS, tmp_path, zygote)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[3], *(pytest.param(way, marks=LONG) for way in WAYS[1:3])], ids=str)
def test_loading_ahead_changes_no_bit(train: Train, way: dict[str, object]) -> None:
    usual, ahead = (train("slow", prefetch=prefetch, **way) for prefetch in (0, 8))
    assert ahead.digests() == usual.digests()
    assert ahead.results["results"] == usual.results["results"]


@pytest.mark.parametrize("way", [WAYS[0], WAYS[3], pytest.param(WAYS[2], marks=LONG)], ids=str)
def test_processes_that_read_change_no_bit_even_when_one_is_killed(
    train: Train, way: dict[str, object], tmp_path: Path
) -> None:
    marker = tmp_path / "killed"
    usual, beside = train("slow", prefetch=0, **way), train("slow", loaders=2, marker=str(marker), **way)
    assert beside.digests() == usual.digests()
    assert beside.results["results"] == usual.results["results"]
    assert marker.exists() and any(
        "was killed by SIGKILL; another" in told["text"] for told in beside.told("warning")
    )


@pytest.mark.alone
def test_who_has_data_read_beside_it_does_not_wait_for_it(train: Train, tmp_path: Path) -> None:
    """Two processes read more than a step takes, though each is slower than the model."""
    timeline = tmp_path / "timeline"
    train.run(Job(target=f"{TASKS}:paced", cluster=Cluster(threads=1), options={"timeline": str(timeline)}))
    done_at = [when for when, _ in read_timeline(timeline)[10:]]
    assert (done_at[-1] - done_at[0]) / (len(done_at) - 1) < 1.3 * STEP_S


@pytest.mark.parametrize("kind", ["arrays", "mapped", "loader"])
def test_data_as_people_have_it_trains_as_tensors_do(train: Train, kind: str, tmp_path: Path) -> None:
    usual = train("as_given", kind="tensors", workers=2)
    given = train("as_given", kind=kind, folder=str(tmp_path), workers=2)
    assert given.digests() == usual.digests() and given.results["results"] == usual.results["results"]
    assert given.results["audit"]["clean"]


@pytest.mark.parametrize("counted", [True, False])
def test_data_that_is_gone_through_is_the_same_for_any_workers(train: Train, counted: bool) -> None:
    alone = train("gone_through", counted=counted, workers=1, slots=2)
    assert alone.results["audit"]["samples"] == (210 if counted else 320)
    for way in ({"loaders": 1}, {"strategy": "ps"}):
        shared = train("gone_through", counted=counted, workers=2, **way)
        assert shared.results["digest"] == alone.results["digest"] and shared.results["audit"]["clean"]


def test_data_that_is_gone_through_survives_a_kill_and_is_resumed_exactly(train: Train) -> None:
    whole = train("gone_through", counted=False, workers=2, checkpoint="every=8")
    killed = train("gone_through", counted=False, workers=2, spares=1, chaos="kill worker:1 at step 7")
    resumed = train.resume(whole, 8)
    assert whole.digests() == killed.digests() == resumed.digests()


ALONE = {"workers": 1, "slots": 2, "strategy": "data"}


@pytest.mark.parametrize(
    "way", [WAYS[0], WAYS[2], *(pytest.param(way, marks=LONG) for way in (WAYS[1], ALONE))], ids=str
)
def test_workers_without_the_data_train_as_those_that_have_it(
    train: Train, way: dict[str, object], tmp_path: Path
) -> None:
    note = tmp_path / "holders"
    held = train("copied", **way)
    sent = train("shipped", holder=str(note), **way)
    assert sent.digests() == held.digests()
    assert sent.results["results"] == held.results["results"]
    makers = note.read_text().split()
    assert len(makers) == 2 and len(set(makers)) == 1, "train and test set were made by one process"


def test_a_fold_of_shipped_data(train: Train, tmp_path: Path) -> None:
    fold = {"overrides": {"fold": "2/4"}, "workers": 2}
    note = tmp_path / "holders"
    assert train("shipped", holder=str(note), **fold).digests() == train("copied", **fold).digests()
    assert len(set(note.read_text().split())) == 1


def test_a_spare_that_becomes_the_first_worker_serves_the_data(train: Train, tmp_path: Path) -> None:
    import os
    import signal

    usual = train("copied", workers=2)
    note = tmp_path / "holders"
    killed: list[int] = []

    def kill_the_holder(event: object) -> None:
        if getattr(event, "kind", "") == "steps" and not killed:
            killed.append(int(note.read_text().split()[0]))
            os.kill(killed[0], signal.SIGKILL)

    after = train("shipped", holder=str(note), workers=2, spares=1, on_event=kill_the_holder)
    assert killed and after.digests() == usual.digests()
    assert len(set(note.read_text().split())) >= 2, "its successor made it anew"


def test_what_cannot_be_sent_and_what_cannot_be_read_are_told(train: Train) -> None:
    with pytest.raises(ShoalError, match="a sample holds a object, which cannot be sent"):
        train("shipped_oddly", workers=2)
    with pytest.raises(ShoalError, match="disk on fire"):
        train("shipped_badly", workers=2)
