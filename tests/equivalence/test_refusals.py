"""What cannot be computed right is refused with a sentence, never computed wrong."""

from __future__ import annotations

import pytest

from helpers.training import Train
from shoal.errors import SpecError, WorkerFailed
from shoal.spec import Cluster, Job


def test_spares_need_the_journal() -> None:
    with pytest.raises(SpecError, match="keeps none; leave journal on"):
        Job(target="a.py", strategy="data:journal=off", cluster=Cluster(workers=2, spares=1))


def test_only_training_uses_spares() -> None:
    with pytest.raises(SpecError, match="only training can use spares"):
        Job(target="a.py", purpose="evaluate", cluster=Cluster(spares=1))


@pytest.mark.parametrize(("workers", "strategy"), [(1, "data"), (2, "data"), (2, "data:via=ring")])
def test_a_batch_without_weight(train: Train, workers: int, strategy: str) -> None:
    with pytest.raises(WorkerFailed, match="weights of the batch of step 1 add up to 0"):
        train("weightless", workers=workers, strategy=strategy)


@pytest.mark.parametrize("strategy", ["data", "data:via=ring"])
def test_a_large_buffer_that_moves(train: Train, strategy: str) -> None:
    with pytest.raises(WorkerFailed, match=r"buffer 'history' \(5000 elements\) changes during training"):
        train("remembering", workers=2, strategy=strategy)


def test_written_shares_say_how_many_slots() -> None:
    assert Job(target="a.py", strategy="data:shares=1+3", cluster=Cluster(workers=2)).num_slots == 4


def test_parts_of_a_batch_cannot_be_left_out_where_the_model_is_cut(train: Train) -> None:
    with pytest.raises(
        WorkerFailed, match=r"skip_loss_below .* but strategy=mesh:data=2 cannot do without them; use data"
    ):
        train("mlp", workers=2, strategy="mesh:data=2", overrides={"skip_loss_below": 0.1})
