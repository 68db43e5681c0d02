"""Which batches can be compared."""

from __future__ import annotations

from typing import Any

import pytest

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
    "accumulate": 1,
    "has_batchnorm": True,
    "initial_loss": 2.0,
    "repeatable": True,
    "random": False,
    "random_in_float64": False,
}


def facts(**changes: Any) -> Facts:
    return Facts.from_plain(FOUND | changes)


@pytest.mark.parametrize(
    ("num_samples", "workers", "batch_size"),
    [
        (96, 4, 24),  # nothing is left over
        (98, 2, 24),  # 2 are left over, enough for 2 workers
        (98, 4, 23),  # 6 are left over instead of 2
        (25, 24, 24),  # no size fits: the task's own, and the strategy will say why not
    ],
)
def test_every_worker_gets_a_part_of_the_last_batch(num_samples: int, workers: int, batch_size: int):
    found = facts(num_samples=num_samples).synchronised_batch(workers)

    assert found == {"accumulate": 1, "batch_size": batch_size}


def test_one_process_takes_the_batch_of_all_workers():
    assert facts(batch_per_worker=True).global_batch(3) == {"batch_size": 72}
    assert facts().global_batch(3) == {}
