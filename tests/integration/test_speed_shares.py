"""`data:shares=speed`: parts of a batch follow the speed of who computes them, and can be repeated bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from paced_tasks import UNPACED

from helpers.training import Train
from shoal.launch.owner import ZygoteProcess
from shoal.launch.runs import Run, train
from shoal.observe.jsonl import read_events
from shoal.verification import replay_run
from shoal.verification.trials import told_cuts

pytestmark = pytest.mark.alone

TASKS = Path(__file__).with_name("paced_tasks.py")
SPEED = "data:shares=speed"
BATCH = 32
EVEN = (BATCH // 2, BATCH // 2)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(zygote: ZygoteProcess, *, strategy: str = SPEED, args: dict[str, Any] | None = None, **said: Any) -> Run:
    cluster = {"workers": said.pop("workers"), "threads": 1}
    target = f"{TASKS}:paced"
    return train(target, args=args, strategy=strategy, cluster=cluster, progress=False, zygote=zygote, **said)


def told(found: Run, kind: str) -> list[dict[str, Any]]:
    return [event.values for event in read_events(found.folder) if event.kind == kind]


def assert_sound(found: Run, zygote: ZygoteProcess) -> None:
    """Every sample was used once, and one process that cuts as the run did ends with the same bits."""
    assert found.results["audit"]["clean"], found.results["audit"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UNPACED, "")
        report = replay_run(found.folder, zygote=zygote)
    assert report.ok and report.rows[0].comparison == "one process, the same slots, cut as they were"


def mean_share(found: Run, steps: range, *, slot: int) -> float:
    """The part of the batch that a slot had in these steps."""
    log = told_cuts(read_events(found.folder))
    return mean((log.at(step) or EVEN)[slot] / BATCH for step in steps)


def test_who_is_slower_than_others_gets_less_to_do(zygote: ZygoteProcess) -> None:
    chaos = "slow worker:1 x3 at step 10; slow worker:0 x3 at step 60"
    found = run(zygote, workers=2, max_steps=120, chaos=chaos)
    sizes = [cut["sizes"] for cut in told(found, "cuts")]
    assert all(sum(both) == BATCH and min(both) > 0 for both in sizes)
    # Three times as slow at everything: a quarter of the batch, or less by what a step costs besides its samples.
    slower, as_slow = (mean_share(found, steps, slot=1) for steps in (range(40, 60), range(100, 120)))
    assert slower < 0.4, sizes
    assert as_slow > slower + 0.05, sizes
    assert_sound(found, zygote)


def test_weights_stay_right_however_a_batch_is_cut(
    tmp_path: Path, zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    args: dict[str, Any] = {"weighted": True, "accumulate": 2}
    chaos = "slow worker:1 x4 at step 4"
    in_double = partial(Train(TASKS, tmp_path, zygote), "paced", steps=40, numerics="float64", **args)
    split = in_double(strategy=SPEED, workers=2, slots=3, chaos=chaos)
    assert len(split.told("cuts")) > 2, "the cuts must have changed for this to say anything"
    monkeypatch.setenv(UNPACED, "")
    assert split.losses() == pytest.approx(in_double(strategy="data").losses(), rel=1e-9)


@pytest.mark.long
def test_weights_and_pieces_of_a_batch_are_repeated_bit_for_bit(zygote: ZygoteProcess) -> None:
    args: dict[str, Any] = {"weighted": True, "accumulate": 2}
    chaos = "slow worker:1 x4 at step 4"
    assert_sound(run(zygote, args=args, workers=2, slots=3, max_steps=40, chaos=chaos), zygote)


@pytest.mark.parametrize("on_failure", ["replace", pytest.param("shrink", marks=pytest.mark.long)])
def test_whoever_takes_over_cuts_no_other_way_than_others_have_seen(
    zygote: ZygoteProcess, on_failure: str
) -> None:
    kills = "; ".join(f"kill worker:{step // 6 % 2} at step {step}" for step in range(6, 48, 6))
    chaos = f"slow worker:1 x3 at step 3; {kills}" if on_failure == "replace" else "kill worker:0 at step 20"
    found = run(zygote, workers=2, slots=4, max_steps=60, chaos=chaos, on_failure=on_failure, max_failures=50)
    assert len(told(found, "lost")) == chaos.count("kill")
    assert found.results["audit"]["samples"] == found.results["samples"]
    assert_sound(found, zygote)


@pytest.mark.parametrize("also_even", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_resumed_run_goes_on_with_its_cuts(zygote: ZygoteProcess, also_even: bool) -> None:
    chaos = "slow worker:1 x3 at step 4; slow worker:0 x9 at step 30"
    found = run(zygote, workers=2, max_steps=60, checkpoint="every=25,keep=9", chaos=chaos, name="mine")
    before = [cut["from_step"] for cut in told(found, "cuts")]
    assert max(before) > 30, "what the first attempt told of later steps must not count"
    again = train(resume="mine@25", progress=False, zygote=zygote)
    (first,) = [cut for cut in told(again, "cuts")[len(before) :] if cut["from_step"] == 26]
    assert first["sizes"][1] < BATCH / 2
    assert again.results["audit"]["samples"] == again.results["samples"] > BATCH * 50
    assert_sound(again, zygote)
    if also_even:
        assert_sound(train(resume="mine@25", progress=False, zygote=zygote, strategy="data"), zygote)


def test_one_process_takes_all_slots_as_they_come(zygote: ZygoteProcess) -> None:
    found = run(zygote, workers=1, slots=3, strategy=f"{SPEED},via=arena", max_steps=8, args={"batch_size": 3})
    assert {tuple(cut["sizes"]) for cut in told(found, "cuts")} == {(1, 1, 1)}
    assert_sound(found, zygote)
