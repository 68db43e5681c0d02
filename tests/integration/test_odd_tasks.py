"""Tasks with oddities: two workers train what one trains, whatever the way they sum."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.training import Train, largest_difference
from shoal.errors import SpecError, WorkerFailed
from shoal.launch.owner import ZygoteProcess

TASKS = Path(__file__).with_name("odd_tasks.py")


@pytest.fixture
def train(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(TASKS, tmp_path, zygote)


@pytest.mark.parametrize(
    "factory",
    [
        "named_inputs",
        "several_inputs",
        "own_objective",
        "lazy_objective",
        "sparse",
        "narrow",
        "padding_alone",
        "lower_rate_on_plateau",
    ],
)
def test_two_workers_train_what_one_trains(train: Train, factory: str) -> None:
    alone = train(factory, strategy="data")
    for strategy in ("data", "data:via=ring"):
        other = train(factory, workers=2, strategy=strategy)
        assert other.results["steps"] == alone.results["steps"] == 9
        assert other.results["loss"] == pytest.approx(alone.results["loss"], rel=1e-4)
        assert other.results["results"] == pytest.approx(alone.results["results"], rel=1e-4)
        assert largest_difference(other.model, alone.model) < (2e-2 if factory == "narrow" else 1e-4)


def test_lazy_layers_are_the_same_everywhere(train: Train) -> None:
    alone = train("lazy", slots=2)
    assert alone.model["0.weight"].shape == (8, 6) and int(alone.model["1.num_batches_tracked"]) == 9
    assert train("lazy", workers=2).digests() == alone.digests()
    train("lazy", workers=2, numerics="float64")


def test_a_last_batch_smaller_than_the_slots(train: Train) -> None:
    arena = train("small_last_batch", workers=4)
    assert train("small_last_batch", slots=4).digests() == arena.digests()
    assert arena.results["steps"] == 9 and arena.results["samples"] == 99
    for via in ("ring", "backend"):
        other = train("small_last_batch", workers=4, strategy=f"data:via={via}")
        assert int(other.model["2.batches"]) == int(arena.model["2.batches"]) == 9
        assert largest_difference(other.model, arena.model) < 1e-4


def test_synchronised_batchnorm_refuses_a_last_batch_smaller_than_the_slots(train: Train) -> None:
    with pytest.raises((SpecError, WorkerFailed), match="the last one of an epoch has only 1"):
        train("small_last_batch", workers=2, strategy="data:batchnorm=sync")


def test_a_plateau_ends_the_run(train: Train) -> None:
    for workers in (1, 2):
        ended = train("plateau", workers=workers, strategy="data")
        assert (ended.results["reason"], ended.results["steps"]) == ("plateau", 9)
        assert len(ended.told("evaluation")) == 3


def test_the_learning_rate_falls_alike(train: Train) -> None:
    rates = [
        [message["lr"] for message in train("lower_rate_on_plateau", workers=workers).told("steps")][-1]
        for workers in (1, 2)
    ]
    assert rates[0] == rates[1] < 0.1


def test_batches_may_be_counted_by_worker(train: Train) -> None:
    two = train("per_worker", workers=2)
    assert (two.results["steps"], two.results["samples"]) == (9, 144)
    assert train("per_worker").results["steps"] == 18


def test_evaluations_come_every_so_many_steps_and_at_the_end(train: Train) -> None:
    for workers in (1, 2):
        run = train("limited", workers=workers)
        assert (run.results["steps"], run.results["reason"]) == (5, "finished")
        assert [message["step"] for message in run.told("evaluation")] == [2, 4, 5]
        assert run.told("evaluation")[-1]["results"] == run.results["results"]
        assert run.results["results"].keys() == {"loss", "accuracy"}
