"""Layers cut by width over real workers: what one process computes, in double precision to nine digits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.training import Train, Trained, largest_difference
from shoal.errors import WorkerFailed
from shoal.launch.owner import ZygoteProcess
from shoal.spec import Cluster

BOUND = 1e-9
MOMENTS = ("exp_avg", "momentum_buffer")


@pytest.fixture
def wide(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(Path(__file__).with_name("tensor_tasks.py"), tmp_path, zygote)


def require_same(train: Train, task: str, *, workers: int = 2, strategy: str = "tensor", **args: Any) -> str:
    """Train alone and cut, in double precision; returns what the cut run said about its layers."""
    alone = train(task, strategy="data", numerics="float64", **args)
    cut = train(task, workers=workers, strategy=strategy, numerics="float64", **args)
    assert largest_difference(alone.model, cut.model) < BOUND
    assert cut.results["results"] == pytest.approx(alone.results["results"], rel=BOUND)
    assert cut.state.keys() == alone.state.keys()
    if task != "conv":  # a bias before BatchNorm has a gradient that is nothing but rounding
        assert largest_difference(alone.state, cut.state) < BOUND
    moments = [value for name, value in cut.state.items() if name.rpartition("/")[2] in MOMENTS]
    assert moments and all(bool(value.any()) for value in moments), "a parameter never had a gradient"
    return told(cut)


def told(trained: Trained) -> str:
    return "\n".join(line["text"] for line in trained.told("line"))


@pytest.mark.parametrize(
    ("task", "optimizer", "wanted"),
    [
        ("mlp_quiet", "adamw", ["the model: cut together: 0 by column, 2 by row", "5: cut by vocabulary"]),
        # Its forward counts on four heads, so what attention needs is gathered.
        (
            "gpt_quiet",
            "momentum",
            ["feed: cut together", "tokens, head: cut by vocabulary", "qkv, mix: cut by col"],
        ),
        ("conv", "momentum", ["0 by column, 3 by row, 1 by channels", "4: whole: BatchNorm2d is not cut"]),
    ],
)
def test_as_one_process(train: Train, task: str, optimizer: str, wanted: list[str]) -> None:
    found = require_same(train, task, optimizer=optimizer, steps=5)
    assert all(words in found for words in wanted), found


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("task", ["mlp_quiet", "gpt_quiet", "conv"])
def test_as_one_process_in_all_combinations(train: Train, task: str, optimizer: str, workers: int) -> None:
    require_same(train, task, optimizer=optimizer, workers=workers)


def test_heads_are_shared_out(wide: Train) -> None:
    found = require_same(wide, "gpt", strategy="tensor:norms=sequence")
    assert "blocks.*.attention (2): cut together: qkv by column, out by row, heads divided" in found
    assert "tokens, head, positions: cut by vocabulary" in found
    assert "blocks.*.norm1 (2), blocks.*.norm2 (2), norm: sequence-parallel: 5 norms" in found


def test_hugging_face(wide: Train) -> None:
    found = require_same(wide, "hugging_face", strategy="tensor:norms=sequence")
    assert "inner.transformer.h.*.attn (2): cut together: c_attn by column, c_proj by row" in found
    assert "inner.transformer.h.*.mlp (2): cut together" in found
    assert "sequence-parallel: 5 norms" in found


def test_the_encoder_of_torch_as_one_process(wide: Train) -> None:
    """One process evaluates on torch's fast path, which reads weights past their layers."""
    found = require_same(wide, "encoder")
    assert "encoder.layers.*.self_attn (2): cut by heads" in found
    assert "encoder.layers.* (2): cut together: linear1 by column, linear2 by row" in found


def test_convolutions_in_groups(wide: Train) -> None:
    found = require_same(wide, "grouped")
    assert "0: cut together: 0 by column, 3 by row, 2 by groups" in found
    assert "1: cut by groups, input cut and output gathered" in found


@pytest.mark.long
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_the_encoder_of_torch_at_four_workers(wide: Train, optimizer: str, norm_first: bool) -> None:
    require_same(wide, "encoder", optimizer=optimizer, workers=4, norm_first=norm_first)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_convolutions_in_groups_at_four_workers(wide: Train, optimizer: str) -> None:
    require_same(wide, "grouped", optimizer=optimizer, workers=4)


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_both_gpts_in_all_combinations(wide: Train, optimizer: str, workers: int) -> None:
    require_same(wide, "gpt", optimizer=optimizer, workers=workers)
    require_same(wide, "hugging_face", optimizer=optimizer, workers=workers, attention="eager")


def test_a_plan_by_hand(wide: Train) -> None:
    plan = "blocks.*.mlp.0=column;blocks.*.mlp.2=row;blocks.0.attention=heads;positions=whole;head=vocabulary"
    found = require_same(wide, "gpt", strategy=f"tensor:plan={plan};tokens=vocabulary")
    assert "blocks.*.mlp (2): cut together: 0 by column, 2 by row" in found
    assert "blocks.0.attention: cut together" in found
    assert "blocks.1.attention.qkv, blocks.1.attention.out: whole: the plan does not name it" in found
    assert "positions: whole: the plan says so" in found


def test_a_weight_used_past_its_layer(wide: Train) -> None:
    """No block shows it, but the model as a whole does: then the embedding stays whole."""
    found = require_same(wide, "past_its_layer")
    assert "up by column, down by row" in found
    assert "tokens: whole: with it cut, the model computes something else" in found
    with pytest.raises(WorkerFailed, match="another loss or other gradients"):
        wide("past_its_layer", workers=2, strategy="tensor:plan=tokens=vocabulary")


def test_dropout_outside_of_cut_layers_is_that_of_one_process(wide: Train) -> None:
    alone = wide("gpt", strategy="data", dropout=0.3, optimizer="momentum")
    cut = wide("gpt", workers=2, strategy="tensor", dropout=0.3, optimizer="momentum")
    assert largest_difference(alone.model, cut.model) < 1e-4


def test_resumed_as_data(wide: Train) -> None:
    unbroken = wide("gpt", strategy="data", numerics="float64", steps=6)
    begun = wide("gpt", workers=2, strategy="tensor", numerics="float64", checkpoint="every=3", steps=6)
    resumed = wide.resume(begun, 3, strategy="data:via=arena", cluster=Cluster(workers=1, threads=1))
    assert largest_difference(unbroken.model, resumed.model) < BOUND
    again = wide.resume(begun, 3)
    assert largest_difference(begun.model, again.model) < 1e-12


@pytest.mark.long
def test_memory_of_four_workers(wide: Train, tmp_path: Path) -> None:
    """Parameters, gradients and optimizer state, and all other tensors that are alive before an update."""

    def held(workers: int, strategy: str) -> list[int]:
        folder = tmp_path / strategy
        folder.mkdir()
        wide("measured", workers=workers, strategy=strategy, folder=str(folder))
        return [json.loads(file.read_text()) for file in folder.iterdir()]

    (alone,), parts = held(1, "data"), held(4, "tensor:via=backend")
    assert len(parts) == 4
    print(f"of {alone / 1e6:.1f} MB one worker holds {max(parts) / alone:.1%}")
    assert max(parts) < 0.45 * alone


@pytest.mark.long
def test_sequence_parallel_norms_keep_less(wide: Train, tmp_path: Path) -> None:
    """What a pass keeps for the way back, and what a step sends, counted in real workers."""

    def weighed(norms: str) -> tuple[float, float]:
        folder = tmp_path / norms
        folder.mkdir()
        wide("weighed", workers=4, strategy=f"tensor:norms={norms},via=backend", folder=str(folder))
        notes = [json.loads(file.read_text()) for file in folder.iterdir()]
        return max(own[-1][0] for own in notes), max(own[-1][1] - own[-2][1] for own in notes)

    (kept, sent), (kept_in_rows, sent_in_rows) = weighed("replicated"), weighed("sequence")
    assert kept_in_rows < 0.8 * kept
    assert sent_in_rows < 1.005 * sent


@pytest.mark.long
@pytest.mark.parametrize("length", [12, 11, 3])
@pytest.mark.parametrize(
    "strategy", ["tensor", "mesh:data=2,tensor=2", "mesh:shard=2,tensor=2", "mesh:pipeline=2,tensor=2"]
)
def test_sequences_of_any_length(wide: Train, strategy: str, length: int) -> None:
    """Even, uneven, and shorter than the workers are many."""
    strategy += (":" if strategy == "tensor" else ",") + "norms=sequence"
    require_same(wide, "gpt", workers=4, strategy=strategy, length=length)


@pytest.mark.long
def test_blocks_that_are_computed_twice(wide: Train) -> None:
    once = wide("gpt", workers=2, strategy="tensor:norms=sequence", numerics="float64")
    twice = wide.run(replace(once.job, recompute=True))
    assert "blocks.*.attention (2): cut together" in told(twice)
    assert "sequence-parallel: 5 norms" in told(twice)
    assert largest_difference(once.model, twice.model) < 1e-12
