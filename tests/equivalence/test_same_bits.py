"""The same slots give the same bits, whoever fills them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.training import Train, largest_difference

WORLDS = {"2": (2, "even"), "4": (4, "even"), "1+3": (2, "1+3")}


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("gpt", "momentum"),
        ("conv", "adamw"),
        pytest.param("mlp", "adamw", marks=LONG),
        pytest.param("mlp", "momentum", marks=LONG),
        pytest.param("gpt", "adamw", marks=LONG),
        pytest.param("conv", "momentum", marks=LONG),
    ],
)
def test_four_slots_on_any_number_of_processes(train: Train, model: str, optimizer: str) -> None:
    alone = train(model, workers=1, slots=4, optimizer=optimizer)
    assert alone.state
    for workers, shares in WORLDS.values():
        other = train(
            model, workers=workers, slots=4, strategy=f"data:via=arena,shares={shares}", optimizer=optimizer
        )
        assert other.results["steps"] == 20
        assert other.digests() == alone.digests(), f"{workers} workers, shares {shares}"
        assert other.results["loss"] == alone.results["loss"]
        assert other.results["results"] == alone.results["results"]


def test_wide_layers_that_write_in_place(train: Train) -> None:
    alone = train("mlp", workers=1, slots=4, width=600, optimizer="adamw", overrides={"accumulate": 2})
    for workers in (2, 4):
        other = train("mlp", workers=workers, slots=4, width=600, optimizer="adamw", overrides={"accumulate": 2})
        assert other.digests() == alone.digests()


def test_awkward_models_too(train: Train) -> None:
    for optimizer in ("momentum", "adamw"):
        alone = train("awkward", workers=1, slots=4, optimizer=optimizer)
        other = train("awkward", workers=3, slots=4, optimizer=optimizer)
        assert other.digests() == alone.digests()


def test_the_journal_changes_nothing(train: Train) -> None:
    with_journal = train("mlp", workers=2)
    without = train("mlp", workers=2, strategy="data:via=arena,journal=off")
    assert with_journal.digests() == without.digests()


WAYS_TO_SUM = [("ring", 3), ("tree", 3), ("central", 2), ("allgather", 2), ("backend", 2)]


@pytest.mark.parametrize(
    ("via", "workers", "model"),
    [
        *((*way, "conv") for way in WAYS_TO_SUM),
        *(pytest.param(*way, "mlp", marks=LONG) for way in WAYS_TO_SUM),
    ],
)
def test_other_ways_to_sum_stay_close(train: Train, via: str, workers: int, model: str) -> None:
    """Sums in another order differ in the last bits; momentum over 20 steps keeps that small."""
    arena = train.once(model, workers=workers)
    other = train(model, workers=workers, strategy=f"data:via={via}")
    assert largest_difference(arena.model, other.model) < 2e-4
    assert largest_difference(arena.state, other.state) < 2e-3
    assert other.results["loss"] == pytest.approx(arena.results["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("model", "via"),
    [
        *((model, "arena") for model in ("mlp", "padded")),
        ("conv", "ring"),
        *(pytest.param(model, "arena", marks=LONG) for model in ("gpt", "conv")),
        pytest.param("conv", "backend", marks=LONG),
        *(
            pytest.param(model, via, marks=LONG)
            for model in ("mlp", "gpt", "padded")
            for via in ("backend", "ring")
        ),
    ],
)
def test_float64_equals_the_whole_batch(train: Train, model: str, via: str) -> None:
    whole = train.once(model, workers=1, strategy="data", numerics="float64")
    parts = train(model, workers=2, strategy=f"data:via={via},batchnorm=sync", numerics="float64")
    assert largest_difference(whole.model, parts.model) < 1e-9
    assert largest_difference(whole.state, parts.state) < 1e-9


def test_synchronised_batchnorm_of_parts_that_follow_speed(train: Train) -> None:
    """However uneven they are, they are normalised as the whole batch."""
    whole = train.once("conv", workers=1, strategy="data", numerics="float64")
    parts = train("conv", workers=2, strategy="data:batchnorm=sync,shares=speed", numerics="float64")
    assert largest_difference(whole.model, parts.model) < 1e-9


@pytest.mark.parametrize(
    "args", [{"optimizer": "lbfgs", "steps": 4}, pytest.param({"optimizer": "adamw"}, marks=LONG)], ids=str
)
def test_synchronised_batchnorm_on_any_number_of_processes(train: Train, args: dict) -> None:
    """Slots of one process wait for each other where they meet. LBFGS lets the first process compute all."""
    sync = "data:via=arena,batchnorm=sync"
    alone = train("conv", workers=1, slots=4, strategy=sync, **args)
    for workers, shares in WORLDS.values():
        other = train("conv", workers=workers, slots=4, strategy=f"{sync},shares={shares}", **args)
        assert other.digests() == alone.digests(), f"{workers} workers, shares {shares}"
        assert other.results["loss"] == alone.results["loss"]


@pytest.mark.parametrize("via", ["arena", pytest.param("ring", marks=LONG)])
def test_recomputing_with_synchronised_batchnorm(train: Train, via: str) -> None:
    """Statistics are exchanged and move once: no bit is another than those that are as with the whole batch."""
    args = {"numerics": "float64", "steps": 6, "overrides": {"accumulate": 2}}
    once = train("conv", workers=2, strategy=f"data:via={via},batchnorm=sync", **args)
    twice = train.run(replace(once.job, recompute=True))
    assert twice.digests() == once.digests()
    assert twice.results["loss"] == once.results["loss"]
