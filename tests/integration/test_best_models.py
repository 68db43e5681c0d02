"""The best model that was evaluated is kept, whatever happens, and may be the one that the run ends with."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from told_tasks import DIARY

import shoal
from shoal.checkpoint.best_files import BestFiles
from shoal.launch.owner import ZygoteProcess
from shoal.launch.runs import Run, train
from shoal.observe import RunFolder, read_events

TASKS = Path(__file__).with_name("told_tasks.py")
FAST = 0.2
"""A learning rate at which the loss goes up and down."""


@pytest.fixture
def run(tmp_path: Path, zygote: ZygoteProcess) -> Any:
    def start(name: str, **asked: Any) -> Run:
        wanted: dict[str, Any] = {"checkpoint": "every=8", **asked}
        if "resume" not in wanted:
            wanted |= {"target": f"{TASKS}:told", "name": name, "cluster": {"workers": 2, "threads": 1}}
        return train(**wanted, runs=tmp_path, progress=False, output=StringIO(), zygote=zygote)

    return start


def best_of(found: Run) -> tuple[int, dict[str, float]]:
    """By the run's own events: the step of the smallest loss, and what was found there."""
    told = [event.values for event in read_events(found.folder) if event.kind == "evaluation"]
    best = min(told, key=lambda one: one["results"]["loss"])
    return best["step"], best["results"]


MORE = ("pipeline", "data:partition=relay")


@pytest.mark.parametrize(
    "strategy", ["data", "sharded", "ps:servers=1", *(pytest.param(one, marks=pytest.mark.long) for one in MORE)]
)
def test_the_best_is_kept_beside_the_last(run: Any, zygote: ZygoteProcess, strategy: str) -> None:
    args = {"best": "-loss", "rate": FAST}
    found = run("one", strategy=strategy, args=args, evaluate_every=4)
    step, results = best_of(found)
    best = found.results["best"]
    assert (best["by"], best["step"], best["results"]) == ("loss", step, results)
    judged = shoal.evaluate(found.folder / "best.safetensors", output=StringIO(), trust=True, zygote=zygote)
    assert judged.results == pytest.approx(results, rel=1e-5)
    lines = (found.folder / DIARY).read_text().splitlines()
    assert [line for line in lines if line.startswith("best")][-1] == f"best {step}"


@pytest.mark.parametrize(
    "way",
    [{"on_failure": "shrink"}, {"strategy": "data:via=ring", "on_failure": "restart"}],
    ids=lambda way: way["on_failure"],
)
def test_whoever_goes_on_keeps_the_same(run: Any, way: dict[str, str]) -> None:
    asked = {"args": {"best": "-loss", "rate": FAST}, "evaluate_every": 4, **way}
    calm, killed = run("calm", **asked), run("killed", chaos="kill worker:0 at step 23", **asked)
    lost = [event.kind for event in read_events(killed.folder) if event.kind in ("lost", "restarted")]
    assert len(lost) == 1 and killed.results["best"] == calm.results["best"]
    told = [line for line in (killed.folder / DIARY).read_text().splitlines() if line.startswith("best")]
    assert told and len(told) == len(set(told))


def test_a_resumed_run_knows_what_was_the_best_at_its_checkpoint(run: Any) -> None:
    args = {"best": "-loss", "rate": FAST}
    whole = run("one", args=args, evaluate_every=4, checkpoint="every=8,keep=99")
    then = BestFiles(RunFolder(whole.folder), begun_at=16).newest()
    assert then is not None and then.step <= 16
    again = run("one", resume="one@16", checkpoint=None)
    assert again.results["best"] == whole.results["best"]


def test_a_plateau_ends_with_the_best(run: Any) -> None:
    found = run("one", args={"patience": 2, "rate": FAST}, evaluate_every=2)
    step, results = best_of(found)
    best = found.results["best"]
    assert (best["step"], best["results"]) == (step, results) and found.results["results"] == results
    assert found.digest == best["digest"] and found.results["steps"] > step
