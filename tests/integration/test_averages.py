"""Averages of the parameters lie where the optimizer's state does, and are the same whatever happens."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import shoal
from helpers.training import largest_difference
from shoal.checkpoint.model_file import load_tensors
from shoal.launch.owner import ZygoteProcess
from shoal.launch.runs import Run, train

TASKS = Path(__file__).with_name("told_tasks.py")
AVERAGES = {"ema": {"ema": 0.9}, "swa": {"swa": 11}, "asgd": {"optimizer": "ASGD"}}


@pytest.fixture
def run(tmp_path: Path, zygote: ZygoteProcess) -> Any:
    def start(name: str, workers: int = 2, **asked: Any) -> Run:
        wanted: dict[str, Any] = {"checkpoint": "every=8,keep=99", "slots": 2, **asked}
        if "resume" not in wanted:
            wanted |= {"target": f"{TASKS}:told", "name": name, "cluster": {"workers": workers, "threads": 1}}
        return train(**wanted, runs=tmp_path, progress=False, output=StringIO(), zygote=zygote)

    return start


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=() if one == "ema" else pytest.mark.long) for one in AVERAGES]
)
def test_kills_and_a_resume_change_no_bit(run: Any, zygote: ZygoteProcess, kind: str) -> None:
    args = AVERAGES[kind]
    alone = run("alone", workers=1, args=args)
    killed = run("killed", args=args, chaos="kill worker:0 at step 9; kill worker:1 at step 20", max_failures=99)
    again = run("alone", resume="alone@16", slots=None, checkpoint=None)
    assert alone.digest == killed.digest == again.digest
    averages = [each.results["average_digest"] for each in (alone, killed, again)]
    assert len(set(averages)) == 1 and averages[0] != alone.digest
    path = alone.folder / "average.safetensors"
    judged = shoal.evaluate(path, output=StringIO(), trust=True, zygote=zygote).results
    if kind != "asgd":
        tried = {name: alone.results["results"][f"average_{name}"] for name in judged}
        assert tried == pytest.approx(judged, rel=1e-5) and tried["loss"] != alone.results["results"]["loss"]
    assert alone.results["results"] == killed.results["results"] == again.results["results"]


@pytest.mark.parametrize(
    "strategy",
    [
        "ps:servers=2",
        "pipeline",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("sharded", "tensor", "layer:place=0@0+2@1")),
    ],
)
def test_every_strategy_keeps_the_same(run: Any, strategy: str) -> None:
    slots = 2 if strategy.startswith("ps") else None
    alone = run("alone", workers=1, args={"ema": 0.9})
    found = run("cut", strategy=strategy, args={"ema": 0.9}, slots=slots)
    ours, theirs = (load_tensors(each.folder / "average.safetensors") for each in (found, alone))
    assert largest_difference(ours, theirs) < 1e-3
    assert largest_difference(theirs, load_tensors(alone.folder / "model.safetensors")) > 1e-3


def test_where_each_worker_has_its_own_optimizer_it_is_refused(run: Any) -> None:
    with pytest.raises(shoal.ShoalError, match=r"ema=0\.9 keeps an average"):
        run("one", strategy="ps:servers=1,push=parameters,every=2", args={"ema": 0.9})
