"""Mixed precision and recomputation, with real workers from the first step to the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shoal
from helpers.training import Train, Trained, largest_difference
from shoal.launch.owner import ZygoteProcess
from shoal.observe import RunFolder
from shoal.spec import Cluster, Job

TASKS = Path(__file__).with_name("half_tasks.py")
MIB = 1 << 20


class Runs:
    """`runs("small", "bf16", workers=2)`: one run after the other."""

    def __init__(self, folder: Path, zygote: ZygoteProcess) -> None:
        self.train = Train(TASKS, folder, zygote)

    def __call__(self, factory: str, precision: str = "fp32", *, workers: int = 1, **fields: Any) -> Trained:
        cluster = Cluster(workers=workers, threads=1, spares=fields.pop("spares", 0))
        args = fields.pop("args", {})
        target = f"{TASKS}:{factory}"
        return self.train.run(Job(target=target, precision=precision, cluster=cluster, args=args, **fields))


@pytest.fixture
def runs(tmp_path: Path, zygote: ZygoteProcess) -> Runs:
    return Runs(tmp_path, zygote)


def test_bf16_is_the_same_on_any_workers_and_learns(runs: Runs) -> None:
    alone = runs("small", "bf16", slots=2)
    assert runs("small", "bf16", workers=2).digests() == alone.digests()
    assert runs("small", "bf16", workers=2, strategy="ps:sync=bsp").results["digest"] == alone.results["digest"]
    losses = alone.losses()
    assert losses[12] < 0.8 * losses[1]
    assert alone.results["precision"] == "bf16"
    assert alone.results["results"]["accuracy"] > 0.5
    assert {value.dtype.itemsize for value in alone.model.values()} == {4}


def test_an_overflow_in_one_slot_skips_the_step_for_all(runs: Runs) -> None:
    alone, together = runs("overflowing", "fp16", slots=2), runs("overflowing", "fp16", workers=2)
    assert alone.digests() == together.digests()
    for run in (alone, together):
        assert (run.results["skipped_steps"], run.results["loss_scale"]) == (1, 32768.0)
    before, skipped = (runs("overflowing", "fp16", slots=2, args={"steps": steps}) for steps in (2, 3))
    assert before.digests() == skipped.digests()


@pytest.mark.long
def test_whoever_takes_over_or_resumes_knows_the_scale(runs: Runs) -> None:
    args = {"steps": 100}
    whole = runs("overflowing", "fp16", workers=2, checkpoint="every=44", args=args)
    replaced = runs("overflowing", "fp16", workers=2, spares=1, chaos="kill worker:0 at step 30", args=args)
    assert replaced.told("replaced")
    resumed = runs.train.resume(whole, 44, cluster={"workers": 1})
    for run in (whole, replaced, resumed):
        assert run.digests() == whole.digests()
        assert (run.results["skipped_steps"], run.results["loss_scale"]) == (5, 2048.0)


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    ["data:via=ring", "data:partition=relay", "sharded", "sharded:stage=3", "tensor", "pipeline", "mesh:data=2"],
)
def test_every_strategy_skips_the_step(runs: Runs, strategy: str) -> None:
    run = runs("overflowing", "fp16", workers=2, strategy=strategy)
    slots = 1 if strategy in ("data:partition=relay", "tensor", "pipeline") else 2
    expected = runs("overflowing", "fp16", slots=slots, strategy="data:via=arena")
    assert (run.results["skipped_steps"], run.results["loss_scale"]) == (1, 32768.0)
    assert largest_difference(run.model, expected.model) < 1e-2


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["sharded:stage=3", "tensor", "pipeline:split=2+3", "ps", "ps:wire=tcp"])
def test_every_strategy_recomputes(runs: Runs, strategy: str) -> None:
    args = {"blocks": 4, "batch": 64}
    plain, saving = (
        runs("deep", workers=2, strategy=strategy, recompute=recompute, args=args) for recompute in (False, True)
    )
    assert saving.digests() == plain.digests()


def test_adaptive_names_the_layer_whose_gradients_are_tiny(runs: Runs) -> None:
    run = runs("faint", "adaptive", workers=2)
    assert run.results["float32_layers"] == ["faint"]
    assert [line["text"] for line in run.told("line") if "float32" in line["text"]] == [
        "faint computes in float32: its gradients leave the range of half precision"
    ]


def test_recomputing_saves_memory_and_changes_no_bit(tmp_path: Path, zygote: ZygoteProcess) -> None:
    peaks, digests = [], []
    for recompute in (False, True):
        with (tmp_path / "screen.txt").open("w") as screen:
            run = shoal.train(
                f"{TASKS}:deep", recompute=recompute, runs=tmp_path, progress=False, output=screen, zygote=zygote
            )
        digests.append(run.digest)
        peaks.append(run.results["peak_memory"]["0"])
    assert digests[0] == digests[1]
    # 32 blocks keep a dozen times the MiB that they are given, or that alone.
    assert peaks[1] < peaks[0] - 200 * MIB
    folder = RunFolder.open(run.folder)
    assert "--recompute" in folder.report.read_text()
    assert f"| 0 | {peaks[1] / 1e6:.0f} MB |" in folder.report.read_text()
    assert f"{peaks[1] / 1e6:.0f} MB at most in a worker" in (tmp_path / "screen.txt").read_text()
