"""Groups of workers that train in lockstep inside, and agree with each other now and then."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_average import assert_goes_on

from helpers.training import Train, largest_difference
from shoal.errors import SpecError
from shoal.launch.owner import ZygoteProcess
from shoal.spec import Cluster, Job, parse_strategy


@pytest.fixture
def resumed(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(Path(__file__).with_name("resumed_tasks.py"), tmp_path, zygote)


@pytest.mark.parametrize(
    ("keys", "workers"),
    [
        ("every=5,outer=nesterov", 4),
        pytest.param("every=6,parts=3,delay=2", 4, marks=pytest.mark.long),
        pytest.param("every=7,combine=ensemble", 4, marks=pytest.mark.long),
        pytest.param("every=4,after=6,weight=even", 4, marks=pytest.mark.long),
    ],
)
def test_a_group_is_one_worker_with_the_batches_of_all(train: Train, keys: str, workers: int) -> None:
    """Two groups of two are two workers; the small batches at an epoch's end, too, are cut at the same sample."""
    alone = train("mlp", workers=2, strategy=f"average:{keys}", numerics="float64", optimizer="adamw")
    groups = train(
        "mlp",
        workers=workers,
        strategy=f"average:{keys},inside=data,groups=2",
        numerics="float64",
        optimizer="adamw",
    )
    assert largest_difference(groups.model, alone.model) < 1e-9
    assert groups.results["results"]["loss"] == pytest.approx(alone.results["results"]["loss"], abs=1e-9)
    assert groups.losses() == pytest.approx(alone.losses(), abs=1e-9)
    assert groups.results["audit"]["clean"]


@pytest.mark.parametrize(
    "keys",
    [
        "every=4,outer=adam,groups=2",
        pytest.param("every=6,parts=3,delay=3,groups=2,via=sockets,compress=int8", marks=pytest.mark.long),
        pytest.param("every=5,combine=ensemble,groups=2", marks=pytest.mark.long),
    ],
)
def test_groups_go_on_exactly(resumed: Train, keys: str) -> None:
    """Three workers in two groups: of one, and of two."""
    saved = resumed(
        "everything",
        workers=3,
        strategy=f"average:{keys},inside=data",
        checkpoint="every=7",
        overrides={"evaluate_every": 7},
    )
    assert next(told["step"] for told in saved.told("checkpoint")) == 7
    assert_goes_on(saved, resumed.resume(saved, 7), 7)


def test_a_group_without_samples_takes_no_step(train: Train) -> None:
    """The last batch of an epoch has one sample for two groups of two."""
    strategy = "average:every=3,inside=data,groups=2"
    run = train("mlp", workers=4, strategy=strategy, overrides={"batch_size": 40})
    assert run.results["audit"]["clean"] and run.results["steps"] == 20


def test_groups_that_could_not_be_are_refused() -> None:
    with pytest.raises(SpecError, match="write groups=2"):
        Job(target="a.py", strategy="average:inside=data", cluster=Cluster(workers=2))
    with pytest.raises(SpecError, match="need at least one each"):
        Job(target="a.py", strategy="average:inside=data,groups=3", cluster=Cluster(workers=2))
    with pytest.raises(SpecError, match="leave one of the two out"):
        parse_strategy("average:inside=data,groups=2,with=ring")
