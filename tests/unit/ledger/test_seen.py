"""Which samples were seen is computed again from a few numbers."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.errors import CheckpointError, SpecError
from shoal.ledger import Order
from shoal.ledger.seen import DataPass, seen_by, unseen


def test_the_first_positions_of_the_order():
    one = DataPass(length=100, samples=30, seed=4, shuffle=True)
    expected = set(Order(100, 4).samples(0, 0, 30).tolist())
    assert set(np.flatnonzero(seen_by([one]))) == expected
    assert set(unseen([one], 120)) == set(range(120)) - expected


@pytest.mark.parametrize("samples", [100, 150, 1000])
def test_a_whole_epoch_is_all_of_it(samples):
    one = DataPass(length=100, samples=samples, seed=4, shuffle=True)
    assert unseen([one], 103).tolist() == [100, 101, 102]


def test_passes_over_data_that_grows():
    """Each takes what those before have left, in its own order; one that skips nothing may meet it again."""
    passes = [
        DataPass(length=50, samples=10, seed=1, shuffle=False),
        DataPass(length=60, samples=20, seed=2, shuffle=False, skips_seen=True),
        DataPass(length=80, samples=35, seed=3, shuffle=False),
    ]
    assert np.flatnonzero(seen_by(passes[:1])).tolist() == list(range(10))
    assert np.flatnonzero(seen_by(passes[:2])).tolist() == list(range(30))
    assert np.flatnonzero(seen_by(passes)).tolist() == list(range(35))
    shuffled = [passes[0], DataPass(length=60, samples=20, seed=2, shuffle=True, skips_seen=True)]
    left = np.arange(10, 60)
    assert set(np.flatnonzero(seen_by(shuffled))) == {*range(10), *left[Order(50, 2).samples(0, 0, 20)]}


def test_what_cannot_be_known_is_said():
    with pytest.raises(SpecError, match="has seen all 100 samples"):
        unseen([DataPass(length=100, samples=100, seed=0, shuffle=True)], 100)
    with pytest.raises(SpecError, match="trained on 100 samples and now there are 90"):
        unseen([DataPass(length=100, samples=10, seed=0, shuffle=True)], 90)
    with pytest.raises(SpecError, match="with a sampler"):
        unseen([DataPass(length=100, samples=10, seed=0, shuffle=True, is_plain=False)], 100)
    with pytest.raises(CheckpointError, match="does not tell which samples"):
        DataPass.from_dict({"length": 3})


def test_plain_data_there_and_back():
    one = DataPass(length=50, samples=10, seed=1, shuffle=False, skips_seen=True)
    assert DataPass.from_dict(one.to_dict()) == one
