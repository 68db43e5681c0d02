"""Workers that take turns train, bit for bit, what one process trains."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.training import Train
from shoal.errors import SpecError, WorkerFailed
from shoal.spec import Cluster, Data, Job, World
from shoal.strategies.base import Extent, Setting


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(("model", "optimizer"), [("mlp", "adamw"), ("conv", "momentum"), ("gpt", "adamw")])
def test_taking_turns_changes_no_bit(train: Train, model: str, optimizer: str, workers: int) -> None:
    alone = train.once(model, strategy="data", optimizer=optimizer)
    relay = train(model, workers=workers, strategy="data:partition=relay", optimizer=optimizer)
    assert relay.digests() == alone.digests()
    assert relay.results["loss"] == alone.results["loss"]
    assert relay.results["results"] == pytest.approx(alone.results["results"], rel=1e-12)


def test_a_plateau_ends_it_alike(train: Train) -> None:
    alone, relay = (
        train("soon_enough", strategy="data"),
        train("soon_enough", workers=2, strategy="data:partition=relay"),
    )
    assert relay.results["reason"] == alone.results["reason"] == "plateau"
    assert relay.digests() == alone.digests()


@pytest.mark.parametrize(("steps", "workers"), [(9, 2), (9, 3), (2, 3), (1, 4), (12, 4)])
def test_each_worker_has_one_block_of_an_epoch(steps: int, workers: int) -> None:
    setting = Setting(
        world=World(world_size=workers),
        conduct=Data(partition="relay").conduct(Cluster(workers=workers)),
        extent=Extent(steps_per_epoch=steps),
    )
    owners = [setting.relay_owner(step) for step in range(1, 2 * steps + 1)]
    assert owners[:steps] == owners[steps:] == sorted(owners[:steps])
    sizes = [owners[:steps].count(rank) for rank in range(workers)]
    assert max(sizes) - min(sizes) <= 1
    for step, owner in enumerate(owners, 1):
        assert [len(setting.slots_at(step, rank)) for rank in range(workers)] == [
            int(rank == owner) for rank in range(workers)
        ]


@pytest.mark.parametrize(
    ("fields", "cluster", "named"),
    [
        ({"strategy": "data:partition=relay,via=ring"}, {}, "take turns with whole batches, .* with other keys"),
        ({"slots": 2}, {}, "slots=2, but .* take turns with whole batches; leave slots out"),
        ({}, {"spares": 1}, "spares=1 .* take turns with whole batches; .* no spares"),
        ({"on_failure": "shrink"}, {}, "on_failure=shrink .* take turns with whole batches"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], cluster: dict[str, int], named: str) -> None:
    with pytest.raises(SpecError, match=named):
        Job(
            **{"target": "x.py", "strategy": "data:partition=relay", **fields},
            cluster=Cluster(workers=2, **cluster),
        )


def test_state_that_is_no_tensor_is_refused(train: Train) -> None:
    with pytest.raises((SpecError, WorkerFailed), match="hands on tensors, but LBFGS keeps"):
        train("mlp", workers=2, optimizer="lbfgs", strategy="data:partition=relay")
