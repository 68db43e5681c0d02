"""`shoal.gather`: a loss over the whole batch, whoever computes its slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.training import Train, Trained, largest_difference
from shoal.errors import WorkerFailed

WHOLE_BATCH = 1e-9


@pytest.fixture
def whole(train: Train) -> Trained:
    """One process in float64, over whole batches."""
    return train.once("contrastive_plain", strategy="data", numerics="float64")


def test_four_slots_on_any_number_of_processes(train: Train) -> None:
    alone = train("contrastive", workers=1, slots=4)
    for workers, shares in ((2, "even"), (4, "even"), (2, "1+3")):
        other = train("contrastive", workers=workers, slots=4, strategy=f"data:via=arena,shares={shares}")
        assert other.digests() == alone.digests(), f"{workers} workers, shares {shares}"
        assert other.losses() == alone.losses()


def test_servers_bring_the_same_bits(train: Train) -> None:
    alone = train("contrastive", workers=1, slots=4)
    for workers in (2, 4):
        served = train("contrastive", workers=workers, slots=4, strategy="ps:servers=2")
        assert served.digests() == alone.digests()
        assert served.results["audit"]["clean"]


@pytest.mark.parametrize(
    ("strategy", "slots"),
    [
        ("data:via=arena", 4),
        ("data:via=ring", 4),
        pytest.param("data:via=backend", 2, marks=pytest.mark.long),
        ("ps", 2),
        ("sharded", None),
        pytest.param("sharded:via=backend", None, marks=pytest.mark.long),
        ("tensor", None),
    ],
)
def test_as_one_process_with_the_whole_batch(
    train: Train, whole: Trained, strategy: str, slots: int | None
) -> None:
    parts = train("contrastive_plain", workers=2, slots=slots, strategy=strategy, numerics="float64")
    assert largest_difference(parts.model, whole.model) < WHOLE_BATCH
    assert largest_difference(parts.state, whole.state) < WHOLE_BATCH
    assert parts.losses() == pytest.approx(whole.losses(), rel=WHOLE_BATCH)


def test_without_gather_another_function_would_be_trained(train: Train, whole: Trained) -> None:
    """The test above would pass for a loss that needs nobody else; this one does."""
    cut = train("contrastive_plain", strategy="data", numerics="float64", overrides={"accumulate": 2})
    assert largest_difference(cut.model, whole.model) > 1e-4


def test_micro_batches_meet_their_like(train: Train) -> None:
    args = {"numerics": "float64", "overrides": {"accumulate": 2, "batch_size": 20}}
    alone = train("contrastive", workers=1, slots=2, **args)
    assert train("contrastive", workers=2, **args).digests() == alone.digests()


@pytest.mark.parametrize(
    ("strategy", "workers", "slots"),
    [
        ("data:via=arena", 1, 2),
        ("data:via=arena", 2, 2),
        ("data:via=ring", 2, 4),
        ("sharded", 2, None),
        ("ps", 2, 2),
    ],
)
def test_slots_that_call_it_unequally_often(train: Train, strategy: str, workers: int, slots: int | None) -> None:
    with pytest.raises(WorkerFailed, match=r"Slots must call shoal\.gather.* equally often"):
        train("uneven_gathers", workers=workers, slots=slots, strategy=strategy)


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("ps:sync=asp", "workers do not wait for each other in memory that they share; use data, sharded"),
        ("ps:wire=tcp", "workers do not wait for each other in memory that they share"),
        ("pipeline", "they follow each other through the model"),
    ],
)
def test_where_parts_cannot_meet(train: Train, strategy: str, why: str) -> None:
    with pytest.raises(WorkerFailed, match=rf"shoal\.gather brings the rows .*, but .*{why}"):
        train("gathered_loss", workers=2, strategy=strategy)


def test_no_mean_check_complains(train: Train) -> None:
    """A loss that gathers is made for parts of a batch."""
    trained = train("contrastive_plain", workers=2)
    assert not [told for told in trained.told("line") if "no mean over samples" in told["text"]]


@pytest.mark.parametrize("on_failure", ["replace", "shrink"])
@pytest.mark.parametrize("slot", [0, pytest.param(3, marks=pytest.mark.long)])
def test_a_kill_between_two_gathers_changes_no_bit(
    train: Train, tmp_path: Path, slot: int, on_failure: str
) -> None:
    """The others wait for rows that the dead one owes them; who follows brings these, and finds theirs."""
    (marker := tmp_path / "killed").touch()
    calm = train("killed_in_gather", workers=2, slots=4, marker=str(marker), of_slot=slot)
    marker.unlink()
    stormy = train.run(replace(calm.job, on_failure=on_failure))
    assert marker.exists() and len(stormy.told("lost")) == 1
    assert stormy.digests() == calm.digests()


def test_a_kill_between_two_gathers_under_servers(train: Train, tmp_path: Path) -> None:
    (marker := tmp_path / "killed").touch()
    calm = train("killed_in_gather", workers=2, slots=4, strategy="ps:servers=2", marker=str(marker), of_slot=3)
    marker.unlink()
    stormy = train.run(calm.job)
    assert marker.exists() and stormy.digests() == calm.digests()
