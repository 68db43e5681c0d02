"""Hugging Face's models under strategies that cut them by depth train as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.training import Train, largest_difference
from shoal.launch.owner import ZygoteProcess

pytest.importorskip("transformers")

BOUNDS = {"loss": 1e-9, "objective": 1e-6}
"""The library's own losses are computed in float32, whatever the model is."""
LAYERS = {"bert": "bert.encoder.layer", "gpt2": "transformer.h", "llama": "model.layers", "vit": "vit.layers"}


@pytest.fixture
def train(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(Path(__file__).with_name("hugging_tasks.py"), tmp_path, zygote)


def compare(train: Train, strategy: str, pieces: int, **task: str) -> None:
    """Evaluated, too."""
    bound = BOUNDS[task["how"]]
    ours = train("hugging", workers=2, strategy=strategy, numerics="float64", **task)
    reference = train("hugging", strategy="data", numerics="float64", overrides={"accumulate": pieces}, **task)
    assert largest_difference(ours.model, reference.model) <= bound
    assert largest_difference(ours.state, reference.state) <= bound
    assert ours.losses() == pytest.approx(reference.losses(), rel=bound)
    assert ours.results["results"] == pytest.approx(reference.results["results"], rel=bound)


@pytest.mark.parametrize(
    ("name", "how", "schedule"),
    [
        ("gpt2", "objective", "interleaved"),
        pytest.param("vit", "loss", "zero-bubble", marks=pytest.mark.long),
        pytest.param("bert", "loss", "1f1b", marks=pytest.mark.long),
        pytest.param("bert", "objective", "gpipe", marks=pytest.mark.long),
        pytest.param("llama", "objective", "1f1b", marks=pytest.mark.long),
        pytest.param("vit", "objective", "interleaved", marks=pytest.mark.long),
    ],
)
def test_stages_train_as_one_process(train: Train, name: str, how: str, schedule: str) -> None:
    compare(train, f"pipeline:schedule={schedule},microbatches=2", 2, name=name, how=how)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("bert", "loss"),
        pytest.param("gpt2", "objective", marks=pytest.mark.long),
        pytest.param("llama", "objective", marks=pytest.mark.long),
        pytest.param("vit", "loss", marks=pytest.mark.long),
    ],
)
def test_placed_blocks_train_as_one_process(train: Train, name: str, how: str) -> None:
    """Back and forth: the block in the middle is elsewhere."""
    place = "+".join(f"{LAYERS[name]}.{block}@{block % 2}" for block in range(3))
    compare(train, f"layer:place={place}", 1, name=name, how=how)
