"""Which one process a strategy is compared with."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.spec import Cluster, Job
from shoal.verification.reference import Reference
from shoal.verification.trials import Facts

FOUND = {
    "trained": ["weight"],
    "untrained": [],
    "buffers": [],
    "optimizer": "SGD",
    "num_samples": 98,
    "seed": 0,
    "batch_size": 24,
    "batch_per_worker": False,
    "accumulate": 2,
    "has_batchnorm": False,
    "initial_loss": 2.0,
    "repeatable": True,
    "random": False,
    "random_in_float64": False,
}


def reference(strategy: str, workers: int = 4, **changes: Any) -> Reference:
    job = Job(target="a.py", strategy=strategy, cluster=Cluster(workers=workers))
    return Reference(job, Facts.from_plain(FOUND | changes))


@pytest.mark.parametrize(
    ("strategy", "slots", "accumulate"),
    [
        ("sharded", 4, None),
        ("tensor", 1, None),
        ("pipeline:microbatches=3", 1, 6),
        ("pipeline", 1, 16),  # two micro-batches for each of four stages, of two pieces each
        ("mesh:data=2,pipeline=2,microbatches=5", 2, 10),
        ("mesh:data=2,shard=2", 4, None),
    ],
)
def test_one_process_cuts_the_batch_as_the_lanes_do(strategy: str, slots: int, accumulate: int | None) -> None:
    found = reference(strategy)
    same = found.same(found.job)

    assert (same.cluster.workers, same.num_slots, same.strategy) == (1, slots, "data:via=arena")
    assert same.overrides.get("accumulate") == accumulate
    assert ("micro-batches" in found.title) == (accumulate is not None)
    in_double = found.in_double()
    assert in_double.title == "one process in float64, whole batch"
    assert (in_double.reference.num_slots, dict(in_double.reference.overrides)) == (1, {})


def test_batchnorm_is_synchronised_to_compare_with_the_whole_batch() -> None:
    pair = reference("mesh:data=2,tensor=2", has_batchnorm=True).in_double()

    assert pair.ours.strategy == "mesh:data=2,tensor=2,batchnorm=sync"
    assert pair.ours.overrides["accumulate"] == pair.reference.overrides["accumulate"] == 1
    assert pair.title.endswith("BatchNorm synchronised") and pair.reference.num_slots == 1


def test_with_batchnorm_in_a_pipeline_both_cut_alike() -> None:
    pair = reference("mesh:data=2,pipeline=2,microbatches=3", has_batchnorm=True).in_double()

    assert pair.title == "one process in float64, the same slots and micro-batches"
    assert (pair.reference.num_slots, pair.reference.overrides["accumulate"]) == (2, 6)
    assert pair.ours.strategy == "mesh:data=2,pipeline=2,microbatches=3" and not pair.other_numbers


@pytest.mark.parametrize(
    ("strategy", "draws_otherwise"),
    [("sharded", False), ("tensor", True), ("pipeline", True), ("layer", True), ("layer:phases=2", False)],
)
def test_who_draws_other_random_numbers(strategy: str, draws_otherwise: bool) -> None:
    assert reference(strategy).draws_otherwise is draws_otherwise


def test_where_layers_take_turns_they_do_so_in_one_process_too() -> None:
    found = reference("layer:phases=2,every=3", workers=2)
    for job, slots in ((found.same(found.job), 2), (found.in_double().reference, 1)):
        assert (job.strategy, job.cluster.workers, job.num_slots) == ("layer:phases=2,every=3", 1, slots)
    assert reference("layer", workers=2).in_double().reference.strategy == "data"


def test_what_rounds_to_float32_by_itself_is_compared_after_one_step() -> None:
    pair = reference("tensor", narrows=True).in_double()

    assert pair.ours.overrides["max_steps"] == pair.reference.overrides["max_steps"] == 1
    assert pair.title == "one process in float64, whole batch, first step"
