"""Losses that are dicts: every number is averaged as the loss is, under every strategy, and told with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dict_loss_tasks
import pytest
from dict_loss_tasks import SHARE

from helpers.training import Train, Trained

STEPS = 6


@pytest.fixture
def train(tmp_path: Path, zygote: Any) -> Train:
    return Train(Path(dict_loss_tasks.__file__), tmp_path, zygote)


def parts_of(trained: Trained) -> dict[int, dict[str, float]]:
    return {step: parts for told in trained.told("steps") for step, parts in told.get("parts") or ()}


@pytest.mark.parametrize(
    ("strategy", "workers", "args"),
    [
        ("data", 1, {"weighted": True, "accumulate": 2}),
        ("data", 2, {"weighted": True, "skip": 1.0}),
        ("data:via=ring", 2, {"weighted": True, "objective": True}),
        ("data:partition=relay", 2, {}),
        ("ps:servers=2", 2, {"weighted": True}),
        ("ps:sync=asp", 2, {"weighted": True}),
        ("ps:servers=1,via=ring", 2, {"weighted": True}),
        ("ps:push=parameters", 2, {}),
        ("ps:servers=host", 2, {"weighted": True}),
        ("sharded", 2, {"weighted": True, "objective": True}),
        ("tensor", 2, {}),
        ("pipeline:microbatches=2", 2, {"weighted": True}),
        ("layer:place=0@0+2@1+4@1", 2, {"weighted": True}),
    ],
)
def test_they_are_averaged_as_the_loss_is(train: Train, strategy: str, workers: int, args: dict[str, Any]) -> None:
    """The loss is a sum of the others, and so is its mean; where all count alike it begins as in one process."""
    trained = train("task", workers=workers, strategy=strategy, **args)
    losses, parts = trained.losses(), parts_of(trained)
    is_lockstep = "asp" not in strategy
    assert sorted(parts) == sorted(losses)
    assert sorted(parts) == list(range(1, STEPS + 1)) or not is_lockstep
    for step, loss in losses.items():
        assert list(parts[step]) == ["ce", "size"]
        assert parts[step]["ce"] + SHARE * parts[step]["size"] == pytest.approx(loss, rel=1e-5)
    results = trained.results["results"]
    assert list(results) == ["loss", "ce", "size", "accuracy"]
    assert results["ce"] + SHARE * results["size"] == pytest.approx(results["loss"], rel=1e-5)
    if is_lockstep and not args.get("weighted"):  # these weights make another loss of two parts than of one
        alone = parts_of(train("task", **{**args, "objective": False}))
        assert parts[1] == pytest.approx(alone[1], rel=1e-5)


def test_a_successor_tells_them_too(train: Train) -> None:
    calm = train("task", workers=2, epochs=40)
    stormy = train("task", workers=2, epochs=40, spares=1, chaos="kill worker:0 at step 30")
    assert stormy.told("lost") and stormy.digests() == calm.digests()
    assert min(parts_of(stormy)) == 1 and max(parts_of(stormy)) > 90, "who came told of its own, too"
    assert parts_of(stormy).items() <= parts_of(calm).items()
