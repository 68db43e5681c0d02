"""A whole copy of the model for each group of workers: all copies take the same steps as one server would."""

from __future__ import annotations

import pytest

from helpers.training import Train, largest_difference, relative_distance


@pytest.mark.parametrize(
    ("model", "workers", "agree"),
    [
        ("mlp", 2, "ring"),
        ("conv", 2, "allreduce"),
        pytest.param("gpt", 3, "allreduce", marks=pytest.mark.long),
    ],
)
def test_copies_that_add_up_are_one_server(train: Train, model: str, workers: int, agree: str) -> None:
    one = train(model, workers=workers, strategy="ps:servers=1", numerics="float64", optimizer="adamw")
    strategy = f"ps:servers=host,hosts=2,agree={agree}"
    copies = train(model, workers=workers, strategy=strategy, numerics="float64", optimizer="adamw")
    assert copies.results["steps"] == one.results["steps"]
    assert largest_difference(copies.model, one.model) < 1e-9
    assert largest_difference(copies.state, one.state) < 1e-9
    assert copies.results["audit"]["clean"]
    assert [row["once"] for row in copies.results["audit"]["shards"]] == [workers * one.results["steps"]] * 2


def test_copies_that_scatter_what_they_changed_come_to_the_same(train: Train) -> None:
    strategy = "ps:servers=host,hosts=2,sync=asp,agree=scatter-sum"
    copies = train("mlp", workers=2, strategy=strategy)
    asp = train("mlp", workers=2, strategy="ps:servers=1,sync=asp")
    rows = copies.results["audit"]["shards"]
    assert copies.results["audit"]["clean"] and [row["once"] for row in rows] == [40, 40]
    # Two asynchronous runs are 0.02 apart; on a busy machine workers fall further behind each other.
    assert relative_distance(copies.model, asp.model) < 0.06
    assert copies.results["results"]["loss"] == pytest.approx(asp.results["results"]["loss"], rel=0.05)
