"""`layer` in real processes: placed layers compute what one process computes, and groups that take turns keep
still in their pause. (For decoupled ones see `test_layer_decoupled.py`.)"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import layer_tasks
import pytest
import torch

from helpers.training import Train, Trained, largest_difference
from shoal.checkpoint.folder import read_folder
from shoal.errors import ShoalError
from shoal.launch.owner import ZygoteProcess
from shoal.observe.checkpoint_names import find_checkpoint

TASKS = Path(__file__).with_name("layer_tasks.py")
PLACED = "layer:place=left@0+right@1+head@0"
BOUND = 1e-9


@pytest.fixture
def train(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(TASKS, tmp_path, zygote)


def assert_equal(ours: Trained, reference: Trained, bound: float = BOUND) -> None:
    assert largest_difference(ours.model, reference.model) <= bound
    assert largest_difference(ours.state, reference.state) <= bound
    for name, value in reference.results["results"].items():
        assert ours.results["results"][name] == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize(
    ("model", "optimizer", "workers", "strategy"),
    [
        ("cat", "adamw", 2, PLACED),
        pytest.param("cat", "momentum", 2, PLACED, marks=pytest.mark.long),
        ("sum", "momentum", 2, "layer"),
        pytest.param("sum", "adamw", 2, "layer", marks=pytest.mark.long),
        pytest.param("sum", "momentum", 3, "layer:place=stem@2+left@0+right@1+active@2", marks=pytest.mark.long),
        ("shared", "adamw", 3, "layer:place=left@1+right@2+memory@0+head@1"),
        pytest.param("shared", "momentum", 2, "layer:place=left@0+right@1", marks=pytest.mark.long),
        pytest.param("cat", "adamw", 1, "layer:place=left@0+right@0", marks=pytest.mark.long),
    ],
)
def test_placed_layers_compute_what_one_process_computes(train, model, optimizer, workers, strategy):
    task = {"model": model, "optimizer": optimizer, "numerics": "float64", "overrides": {"accumulate": 2}}
    ours = train("branched", workers=workers, strategy=strategy, **task)
    assert_equal(ours, train("branched", strategy="data", **task))


def test_an_objective_is_computed_where_the_output_is(train):
    ours = train("by_objective", workers=2, strategy="layer:place=0@0+1@1", numerics="float64")
    reference = train("by_objective", strategy="data", numerics="float64")
    assert largest_difference(ours.model, reference.model) <= BOUND
    assert ours.losses() == pytest.approx(reference.losses(), rel=BOUND)


def test_a_placed_run_goes_on_from_a_checkpoint(train):
    task = {"model": "cat", "optimizer": "adamw", "numerics": "float64"}
    whole = train("branched", workers=2, strategy=PLACED, checkpoint="every=6", **task)
    assert_equal(train.resume(whole, 6), whole, bound=0.0)
    assert_equal(train.resume(whole, 6, strategy="data", cluster={"workers": 1}), whole)


def test_branches_run_at_the_same_time(train, tmp_path):
    """Each branch waits in its pass until the other has begun: the run ends only if they overlap in every step."""
    train("overlapping", workers=2, strategy=PLACED, folder=str(tmp_path), steps=3)
    for left, right in (("left", "right"), ("left-back", "right-back")):
        assert len(layer_tasks.processes(tmp_path, left, 3) | layer_tasks.processes(tmp_path, right, 3)) == 2


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("momentum", marks=pytest.mark.long)])
def test_turns_are_the_same_on_any_workers_and_others_keep_still(train, optimizer):
    task = {"optimizer": optimizer, "numerics": "float64", "strategy": "layer:phases=2,every=4", "slots": 2}
    ours = train("deep", workers=2, checkpoint="every=4", **task)
    assert_equal(ours, train("deep", workers=1, **task))
    at = {step: read_folder(find_checkpoint(f"{ours.job.run_dir}@{step}"), ["model"]).model for step in (4, 8, 12)}
    moved = {
        step: {name.split(".")[0] for name in at[step] if not torch.equal(at[step][name], at[step - 4][name])}
        for step in (8, 12)
    }
    assert moved == {8: {"2", "4"}, 12: {"0"}}


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "fp16", "adaptive"])
def test_placed_layers_in_half_precision(train, precision):
    run = train("branched", workers=2, strategy=PLACED, steps=4)
    half = train.run(replace(run.job, precision=precision, options={}))
    assert half.losses().keys() == run.losses().keys()
    assert largest_difference(half.model, run.model) < 0.2


@pytest.mark.long
@pytest.mark.parametrize(
    ("factory", "strategy", "sentence"),
    [
        ("deep", "layer", "layers form 1 line"),
        ("deep", "layer:place=nothing@0", "'nothing', which the model does not"),
        ("deep", "layer:phases=4", "phases=4 needs as many layers"),
    ],
)
def test_refusals(train, factory, strategy, sentence):
    with pytest.raises(ShoalError, match=sentence):
        train(factory, workers=2, strategy=strategy)
