"""A run that is resumed in the middle of an epoch goes on as if it had never stopped."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.training import Train, Trained
from shoal.checkpoint.listing import list_entries
from shoal.checkpoint.model_file import digest, load_tensors
from shoal.errors import Interrupted, WorkerFailed
from shoal.launch.owner import ZygoteProcess
from shoal.launch.resuming import find_whole, resumed_job
from shoal.observe import Event, RunFolder
from shoal.spec import Cluster

STEPS, SAVED = 20, 14
"""An epoch has 9 steps."""
EVERY = "every=7"
EXACT = {
    "one process": (1, "data"),
    "arena": (2, "data:via=arena"),
    "ring": (2, "data:via=ring"),
    "backend": (2, "data:via=backend"),
    "relay": (3, "data:partition=relay"),
    "bsp": (2, "ps:servers=2"),
    "bsp over tcp": (2, "ps:wire=tcp"),
}
MORE_EXACT = ["backend", "bsp over tcp"]
INTERRUPTED = ["arena", "bsp"]
MORE_INTERRUPTED = ["one process", "ring", "relay", "bsp over tcp"]
BY_TIMING = ["asp"]
MORE_BY_TIMING = ["ssp:3", "alternate:4", "quorum:1/2", "asp,wire=tcp", "asp,shares=speed"]


@pytest.fixture
def train(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(Path(__file__).with_name("resumed_tasks.py"), tmp_path, zygote)


def assert_goes_on(whole: Trained, resumed: Trained, since: int) -> None:
    """The losses from there on, the final model, the optimizer's state and the evaluations, bit for bit."""
    expected = {step: loss for step, loss in whole.losses().items() if step > since}
    assert resumed.losses() == expected and len(expected) == whole.results["steps"] - since
    assert resumed.digests() == whole.digests()
    assert resumed.results["results"] == whole.results["results"]
    assert resumed.results["samples"] == whole.results["samples"]
    evaluations = [told for told in whole.told("evaluation") if told["step"] > since]
    assert resumed.told("evaluation") == evaluations


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in MORE_EXACT else name for name in EXACT]
)
def test_a_resumed_run_equals_the_unbroken_one(train: Train, name: str) -> None:
    workers, strategy = EXACT[name]
    saved = train("everything", workers=workers, strategy=strategy, checkpoint=EVERY)
    assert [told["step"] for told in saved.told("checkpoint")] == [7, SAVED, STEPS]
    assert saved.state
    assert_goes_on(saved, train.resume(saved, SAVED), SAVED)


@pytest.mark.parametrize(
    "name",
    [
        "arena",
        *(pytest.param(name, marks=pytest.mark.long) for name in EXACT if name != "arena"),
    ],
)
def test_saving_changes_nothing(train: Train, name: str) -> None:
    workers, strategy = EXACT[name]
    whole, saved = (
        train("everything", workers=workers, strategy=strategy, checkpoint=rule) for rule in ("none", EVERY)
    )
    assert saved.digests() == whole.digests()
    assert_goes_on(whole, saved, 0)


@pytest.mark.parametrize(
    "strategy", ["data:via=arena", "ps:wire=tcp,servers=2", pytest.param("ps", marks=pytest.mark.long)]
)
def test_an_optimizer_of_the_whole_model_goes_on(train: Train, strategy: str) -> None:
    """Its state lies in one process, wherever that is."""
    saved = train("everything", workers=2, strategy=strategy, optimizer="Adafactor", checkpoint=EVERY)
    assert {name.rpartition("/")[2] for name in saved.state} >= {"step", "row_var", "col_var"}
    assert_goes_on(saved, train.resume(saved, SAVED), SAVED)


@pytest.mark.parametrize(
    ("workers", "strategy"), [(2, "ps:servers=2"), pytest.param(2, "data:via=arena", marks=pytest.mark.long)]
)
def test_a_schedule_that_follows_the_loss_goes_on(train: Train, workers: int, strategy: str) -> None:
    saved = train("everything", workers=workers, strategy=strategy, scheduler="plateau", checkpoint=EVERY)
    rates = {told["lr"] for told in saved.told("steps")}
    assert min(rates) < 0.01, "the schedule has moved"
    assert_goes_on(saved, train.resume(saved, SAVED), SAVED)


@pytest.mark.parametrize(
    ("workers", "strategy"),
    [
        (2, "data:via=arena"),
        pytest.param(1, "data", marks=pytest.mark.long),
        pytest.param(2, "ps:servers=2", marks=pytest.mark.long),
    ],
)
def test_early_stopping_remembers_evaluations(train: Train, workers: int, strategy: str) -> None:
    """Evaluated every 4 steps: stopped after 16, by the evaluations after 4 and 8 that the first part saw."""
    saved = train("everything", workers=workers, strategy=strategy, patience=3, checkpoint=EVERY)
    assert (saved.results["reason"], saved.results["steps"]) == ("plateau", 16)
    assert [told["step"] for told in saved.told("checkpoint")] == [7, 14, 16]
    resumed = train.resume(saved, SAVED)
    assert resumed.results["reason"] == "plateau"
    assert_goes_on(saved, resumed, SAVED)


def test_workers_that_die_after_the_resume_are_replaced(train: Train) -> None:
    """A successor has the whole past: the losses before the checkpoint and after it, and all evaluations."""
    saved = train("everything", workers=2, steps=200, patience=200, checkpoint="every=80")
    for spares in (0, 1):
        resumed = train.resume(
            saved,
            80,
            cluster=Cluster(workers=2, spares=spares, threads=1),
            chaos="kill worker:0 at step 100; kill worker:1 at step 150",
        )
        assert len(resumed.told("replaced")) == 2
        assert resumed.digests() == saved.digests()
        assert resumed.results["results"] == saved.results["results"]


@pytest.mark.parametrize(
    "sync", [*BY_TIMING, *(pytest.param(sync, marks=pytest.mark.long) for sync in MORE_BY_TIMING)]
)
def test_where_timing_decides_nothing_is_lost(train: Train, sync: str) -> None:
    strategy = f"ps:servers=2,sync={sync}"
    saved = train("everything", workers=2, strategy=strategy, steps=60, checkpoint="every=25")
    steps = [told["step"] for told in saved.told("checkpoint")]
    assert steps[0] >= 25 and steps[-1] == 60
    resumed = train.resume(saved, steps[0])
    if sync.startswith("asp"):  # Nothing beyond a border is ever handed out before it is saved.
        assert steps == [25, 50, 60]
        assert [told["step"] for told in resumed.told("checkpoint")] == [50, 60]
    for run in (saved, resumed):
        assert run.results["audit"]["clean"]
        assert run.results["samples"] == saved.results["samples"]
    slots = saved.job.num_slots
    if sync.startswith("quorum"):  # which leaves cells out, so that nothing can be said of those before
        assert resumed.results["audit"]["cells"] == (60 - steps[0]) * slots
    else:
        assert resumed.results["audit"]["cells"] == 60 * slots, "what led to the checkpoint, and the rest"
        assert {shard["once"] for shard in resumed.results["audit"]["shards"]} == {60 * slots}
    assert resumed.results["results"]["loss"] < 1.2 * saved.results["results"]["loss"] + 0.1


@pytest.mark.parametrize(
    "name", [*INTERRUPTED, *(pytest.param(name, marks=pytest.mark.long) for name in MORE_INTERRUPTED)]
)
def test_an_interrupted_run_is_saved_after_its_step(train: Train, name: str) -> None:
    workers, strategy = EXACT[name]
    first = iter([True])

    def interrupt(event: Event) -> None:
        if event.kind == "steps" and next(first, False):  # a second time would end it at once
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        words = {"workers": workers, "strategy": strategy, "steps": 100_000}
        train("everything", **words, checkpoint="every=1h", on_event=interrupt)
    folder = RunFolder.open(train.runs[-1])
    (saved,) = list_entries(folder.checkpoints)
    steps = {"max_steps": saved.step + 6}
    whole = train.run(replace(folder.read_job(), overrides=steps))
    path, manifest = find_whole(str(folder.path), "", print)
    resumed = train.run(resumed_job(folder.read_job(), path, manifest, {"overrides": steps}))
    assert_goes_on(whole, resumed, saved.step)


@pytest.mark.parametrize(
    ("sync", "rule"),
    [
        ("asp", "every=1h"),
        pytest.param("asp", "every=90000", marks=pytest.mark.long),  # whose borders are planned
        pytest.param("ssp:3", "every=1h", marks=pytest.mark.long),
        pytest.param("alternate:4", "every=1h", marks=pytest.mark.long),
        pytest.param("quorum:1/2", "every=1h", marks=pytest.mark.long),
    ],
)
def test_an_interrupted_run_is_saved_where_timing_decides(train: Train, sync: str, rule: str) -> None:
    """All come to one border first; nobody goes on from there, so the model is that of the checkpoint."""
    first = iter([True])

    def interrupt(event: Event) -> None:
        if event.kind == "steps" and next(first, False):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        words = {"workers": 2, "strategy": f"ps:servers=2,sync={sync}", "steps": 100_000}
        train("everything", **words, checkpoint=rule, on_event=interrupt)
    folder = RunFolder.open(train.runs[-1])
    (saved,) = list_entries(folder.checkpoints)
    assert digest(load_tensors(folder.model)) == saved.digest
    path, manifest = find_whole(str(folder.path), "", print)
    steps = {"max_steps": saved.step + 6}
    resumed = train.run(resumed_job(folder.read_job(), path, manifest, {"overrides": steps}))
    assert resumed.results["audit"]["clean"]
    whole = (saved.step + 6) * resumed.job.num_slots
    assert resumed.results["audit"]["cells"] == whole, "what led to the checkpoint, and the rest"


def test_early_stopping_is_saved_where_timing_decides(train: Train) -> None:
    saved = train("everything", workers=2, strategy="ps:sync=asp", steps=4000, patience=3, checkpoint="every=1h")
    assert saved.results["reason"] == "plateau" and saved.results["steps"] < 4000
    (told,) = saved.told("checkpoint")
    assert (told["step"], told["digest"]) == (saved.results["steps"], saved.results["digest"])


def test_more_steps_than_were_asked_for_at_first(train: Train) -> None:
    """From the last checkpoint of a finished run a longer one goes on as if it had been asked for at once."""
    whole = train("everything", workers=2, steps=12)
    short = train("everything", workers=2, steps=12, overrides={"max_steps": 9}, checkpoint="every=100")
    assert_goes_on(whole, train.resume(short, 9, overrides={"max_steps": 12}), 9)
    with pytest.raises(WorkerFailed, match=r"step 9, and the run has 9 steps, so none is left"):
        train.resume(short, 9)


def test_another_order_of_samples_is_refused(train: Train) -> None:
    saved = train("everything", workers=2, checkpoint=EVERY)
    for name, value, words in (("seed", 3, "seed 0, but this run has 3"), ("batch_size", 12, "of 24, but .* 12")):
        with pytest.raises(WorkerFailed, match=words):
            train.resume(saved, SAVED, overrides={name: value})
    with pytest.raises(WorkerFailed, match="a number of samples of 208, but this run has 90"):
        train.resume(replace(saved, job=replace(saved.job, args={"samples": 90})), SAVED)


@pytest.mark.parametrize(
    ("optimizer", "strategy", "words"),
    [
        ("LBFGS", "data", "LBFGS keeps lists of earlier steps"),
        ("Counting", "data", "Counting keeps 'count' as int"),
        ("Counting", "ps", "Counting keeps 'count' as int"),
        ("Counting", "pipeline", "Counting keeps 'count' as int"),
        ("Slowing", "data", "Slowing keeps 'pace' as a setting that it changes itself"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused(train: Train, optimizer: str, strategy: str, words: str) -> None:
    with pytest.raises(WorkerFailed, match=words):
        train("everything", strategy=strategy, optimizer=optimizer, checkpoint=EVERY)
