"""Groups of workers over which a model is cut, and which agree with each other now and then."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_average import assert_goes_on

from helpers.training import Train, Trained, largest_difference
from shoal.errors import SpecError
from shoal.launch.owner import ZygoteProcess
from shoal.spec import Average, Cluster, Job, parse_strategy

TO_PARTS = [
    ("sharded,groups=2", 4),
    pytest.param("sharded:stage:1,policy:layer,groups=2", 4, marks=pytest.mark.long),
    pytest.param("sharded:stage:2,groups=2,via=sockets", 4, marks=pytest.mark.long),
    ("tensor,groups=2", 4),
    ("pipeline,groups=2", 4),
    pytest.param("mesh:data:2", 4, marks=pytest.mark.long),
    pytest.param("mesh:data:2,shard:2", 8, marks=pytest.mark.long),
    pytest.param("mesh:shard:2,tensor:2", 8, marks=pytest.mark.long),
    pytest.param("mesh:shard:2,tensor:2,via=backend", 8, marks=pytest.mark.long),
    pytest.param("mesh:pipeline:2,tensor:2", 8, marks=pytest.mark.long),
]


@pytest.fixture
def resumed(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(Path(__file__).with_name("resumed_tasks.py"), tmp_path, zygote)


def assert_same(found: Trained, expected: Trained) -> None:
    assert largest_difference(found.model, expected.model) < 1e-9
    assert found.losses() == pytest.approx(expected.losses(), abs=1e-9)
    assert found.results["results"] == pytest.approx(expected.results["results"], abs=1e-9)
    assert found.results["audit"]["clean"]
    assert found.results["audit"]["samples"] == expected.results["audit"]["samples"]


@pytest.mark.parametrize(("inside", "workers"), TO_PARTS)
def test_a_group_is_one_worker_that_holds_it_all(train: Train, inside: str, workers: int) -> None:
    """Two groups are two workers, whatever each is cut into; the norm is that of the whole difference."""
    keys = "average:every=5,outer=nesterov,clip=norm:0.05"
    alone = train.once("mlp", workers=2, strategy=keys, numerics="float64", optimizer="adamw")
    how = {"workers": workers, "numerics": "float64", "optimizer": "adamw"}
    assert_same(train("mlp", strategy=f"{keys},inside={inside}", **how), alone)


@pytest.mark.parametrize(("inside", "workers"), TO_PARTS)
def test_agreeing_after_every_step_is_synchronous_training(train: Train, inside: str, workers: int) -> None:
    alone = train.once("mlp", strategy="data", optimizer="SGD", numerics="float64")
    strategy = f"average:every=1,inside={inside}"
    found = train("mlp", workers=workers, strategy=strategy, optimizer="SGD", numerics="float64")
    assert_same(found, alone)
    assert found.results["agreements"] == 20


@pytest.mark.parametrize(
    ("inside", "workers"),
    [
        ("tensor,groups=2", 4),
        pytest.param("pipeline,groups=2", 4, marks=pytest.mark.long),
        pytest.param("sharded,groups=2", 4, marks=pytest.mark.long),
    ],
)
def test_what_several_have_counts_once_in_the_norm(train: Train, inside: str, workers: int) -> None:
    """Weights that two layers share, and those that nobody cuts."""
    keys = "average:every=3,outer=adam,clip=norm:0.02"
    how = {"numerics": "float64", "optimizer": "adamw"}
    alone = train.once("gpt_quiet", workers=2, strategy=keys, **how)
    assert_same(train("gpt_quiet", workers=workers, strategy=f"{keys},inside={inside}", **how), alone)


@pytest.mark.parametrize(
    ("inside", "workers"), [("pipeline,groups=2", 4), pytest.param("sharded,groups=2", 4, marks=pytest.mark.long)]
)
def test_buffers_that_move_are_averaged(train: Train, inside: str, workers: int) -> None:
    """In groups of which every worker normalises by the same samples as those of groups that hold it all."""
    keys = "average:every=3"
    is_cut_by_depth = inside.startswith("pipeline")
    how = {"numerics": "float64", "optimizer": "SGD"}
    other = f"{keys},inside=data,groups=2" if not is_cut_by_depth else keys
    overrides = {"accumulate": 4} if is_cut_by_depth else None  # micro-batches
    whole = train("conv", workers=2 if is_cut_by_depth else 4, strategy=other, overrides=overrides, **how)
    assert any("running_mean" in name for name in whole.model)
    assert_same(train("conv", workers=workers, strategy=f"{keys},inside={inside}", **how), whole)


def test_a_group_without_samples_takes_no_step(train: Train) -> None:
    """The last batch of an epoch has one sample for two groups of two."""
    strategy = "average:every=3,inside=sharded,groups=2"
    how = {"overrides": {"batch_size": 40}, "numerics": "float64", "optimizer": "adamw"}
    run = train("mlp", workers=4, strategy=strategy, **how)
    assert_same(run, train("mlp", workers=2, strategy="average:every=3", **how))


@pytest.mark.parametrize(
    ("keys", "workers"),
    [
        ("every=4,outer=adam,inside=sharded,groups=2", 4),
        pytest.param("every=4,outer=nesterov,inside=tensor,groups=2", 4, marks=pytest.mark.long),
        ("every=4,outer=nesterov,inside=pipeline,groups=2", 4),
        pytest.param(
            "every=4,outer=yogi,inside=mesh:shard:2,pipeline:2,microbatches:2", 8, marks=pytest.mark.long
        ),
        pytest.param("every=4,outer=momentum,inside=mesh:data:2,tensor:2", 8, marks=pytest.mark.long),
        ("every=4,inside=sharded,groups=2,via=sockets,compress=topk:0.3", 4),
        pytest.param(
            "every=4,inside=pipeline:split:2+3,groups=2,via=sockets,compress=powersgd:2", 4, marks=pytest.mark.long
        ),
    ],
)
@pytest.mark.parametrize("step", [7, pytest.param(8, marks=pytest.mark.long)])
def test_groups_go_on_exactly(resumed: Train, keys: str, workers: int, step: int) -> None:
    """In the middle of a round, and at its end."""
    saved = resumed(
        "everything",
        workers=workers,
        strategy=f"average:{keys}",
        checkpoint=f"every={step}",
        overrides={"evaluate_every": step},
    )
    assert next(told["step"] for told in saved.told("checkpoint")) == step
    assert_goes_on(saved, resumed.resume(saved, step), step)


def in_the_middle(train: Train, inside: str, workers: int = 4) -> Trained:
    """A run that was saved after step 7 of rounds of 4."""
    return train(
        "mlp",
        workers=workers,
        strategy=f"average:every=4,outer=nesterov,inside={inside}",
        optimizer="adamw",
        numerics="float64",
        checkpoint="every=7",
        overrides={"evaluate_every": 7},
    )


@pytest.mark.parametrize(
    ("inside", "other", "workers"),
    [
        ("sharded,groups=2", "tensor,groups=2", 4),
        pytest.param("tensor,groups=2", "pipeline,groups=2", 4, marks=pytest.mark.long),
        pytest.param("pipeline,groups=2", "mesh:data:2,shard:2", 8, marks=pytest.mark.long),
    ],
)
def test_a_round_goes_on_in_another_cut(train: Train, inside: str, other: str, workers: int) -> None:
    """What is saved are whole tensors: every group's values and states, and what the outer optimizer keeps."""
    saved = in_the_middle(train, inside)
    strategy = f"average:every=4,outer=nesterov,inside={other}"
    found = train.resume(saved, 7, strategy=strategy, cluster={"workers": workers})
    assert largest_difference(found.model, saved.model) < 1e-9
    expected = {step: loss for step, loss in saved.losses().items() if step > 7}
    assert found.losses() == pytest.approx(expected, abs=1e-9)
    assert found.results["audit"]["clean"]


@pytest.mark.parametrize(
    ("inside", "strategy", "workers", "said"),
    [
        (
            "sharded,groups=2",
            "average:every=4,outer=nesterov,inside=sharded,groups=3",
            6,
            "is of 2 groups of workers",
        ),
        ("sharded,groups=2", "average:every=4,outer=nesterov", 2, "held a model in another way"),
        (
            "data,groups=2",
            "average:every=4,outer=nesterov,inside=sharded,groups=2",
            4,
            "held a model in another way",
        ),
        ("sharded,groups=2", "sharded", 2, ""),
    ],
)
def test_who_cannot_go_on_with_a_round_begins_from_the_mean(
    train: Train, inside: str, strategy: str, workers: int, said: str
) -> None:
    saved = in_the_middle(train, inside)
    found = train.resume(saved, 7, strategy=strategy, cluster={"workers": workers})
    assert found.results["audit"]["clean"] and found.results["steps"] == 20
    lines = [line for line in found.told("line") if "all begin from the mean" in line["text"]]
    assert len(lines) == bool(said) and all(said in line["text"] for line in lines)
    assert found.losses()[8] == pytest.approx(saved.losses()[8], rel=0.2), "with the mean of what the others had"


@pytest.mark.parametrize(
    ("strategy", "workers", "said"),
    [
        ("average:inside=sharded", 4, "must know how many groups there are; write groups=2"),
        ("average:inside=sharded,groups=3", 4, "3 groups of one size, but there are 4 workers; use a number"),
        (
            "average:inside=mesh:shard:2,groups=3",
            4,
            "groups of 2 workers, but there are 4 workers; .* and groups=2",
        ),
        ("average:inside=mesh:shard:3", 4, "a multiple of 3"),
        ("average:inside=layer,groups=2", 4, "average: inside 'layer' is not known. Choose one of: data, mesh"),
        ("average:inside=data:via:ring,groups=2", 4, "takes no keys of its own"),
        ("average:inside=sharded:stages:1,groups=2", 4, "key 'stages' is not known"),
        ("average:inside=sharded:stage:4,groups=2", 4, "stage '4' is not known"),
        ("average:inside=mesh:stage:1,groups=2", 4, "stage=1 acts only with shard=2"),
        ("average:inside=sharded:via:backend,groups=2", 4, "write via=backend as a key of average"),
        ("average:inside=sharded:batchnorm:sync,groups=2", 4, "may be nothing; leave batchnorm out"),
        ("average:inside=mesh:shard=2,tensor=2", 4, "write it there with a colon, as in inside=mesh:tensor:2"),
        ("average:insied=sharded", 4, "key 'insied' is not known"),
        ("average:inside=sharded,groups=2,parts=2", 4, "parts=2 is for workers that have a whole model each"),
        ("average:inside=sharded,groups=2,combine=ensemble", 4, "leave combine out, or use inside=data"),
        ("average:inside=sharded,groups=2,after=4", 4, "leave after out"),
        ("average:inside=sharded,groups=2,with=ring", 4, "leave one of the two out"),
    ],
)
def test_groups_that_could_not_be_are_refused(strategy: str, workers: int, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Job(target="a.py", strategy=strategy, cluster=Cluster(workers=workers))


def test_what_is_inside_is_written_in_one_way() -> None:
    written = "average:inside=mesh:shard:2,tensor:2,plan:blocks.*.up=column;head=row,groups=2"
    spec = parse_strategy(written)
    assert str(spec) == written and parse_strategy(str(spec)) == spec
    assert Average(inside="mesh:shard=2,tensor=2,plan=blocks.*.up=column;head=row", groups=2) == spec
