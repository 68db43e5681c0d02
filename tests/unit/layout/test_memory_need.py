"""What a worker needs under each strategy, and what is advised where that is too much."""

import pytest

from shoal.layout.memory_need import advice, fitting, refusal
from shoal.spec import parse_strategy
from shoal.spec.cut_sizes import cut_evenly
from shoal.spec.model_size import ModelSize

MIB = 1 << 20
LAYERS = ModelSize(trained=(10 * MIB,) * 8, fixed=3 * MIB, kept=2)
"""80 MiB of parameters: with gradients and two values for each element, 320 MiB."""


@pytest.mark.parametrize(
    ("strategy", "workers", "expected_mib"),
    [
        ("data", 1, 323),
        ("data", 4, 323),
        ("ps", 4, 163),
        ("sharded:stage=1", 4, 80 + 80 + 40 + 3),
        ("sharded:stage=2", 4, 80 + (20 + 10) + 40 + 3),
        ("sharded", 4, (20 + 10) + (20 + 10) + 40 + 3),
        ("pipeline", 4, 80 + 3),
        ("pipeline", 3, 120 + 3),
        ("tensor", 4, 80 + 3),
        ("mesh:data=2,pipeline=2", 4, 160 + 3),
        ("mesh:shard=2,pipeline=2", 4, (20 + 10) + (20 + 10) + 40 + 3),
    ],
)
def test_need(strategy, workers, expected_mib):
    assert parse_strategy(strategy).memory_need(workers, LAYERS) == expected_mib * MIB


@pytest.mark.parametrize(
    ("sizes", "count", "largest"),
    [((1, 2, 3, 4), 2, 6), ((9, 1, 1, 1), 2, 9), ((1, 1), 4, 1), ((), 2, 0), ((5, 5, 5, 5, 5), 2, 15)],
)
def test_cut_evenly(sizes, count, largest):
    runs = cut_evenly(sizes, count)
    assert len(runs) == count
    assert tuple(size for run in runs for size in run) == sizes
    assert max(sum(run) for run in runs) == largest


def test_what_fits_is_named_with_the_fewest_workers():
    fits = {fit.strategy: fit for fit in fitting(LAYERS, 160 * MIB, workers=2)}
    assert {name: fit.workers for name, fit in fits.items()} == {"sharded": 4, "pipeline": 4}
    for name, fit in fits.items():
        assert fit.num_bytes == parse_strategy(name).memory_need(fit.workers, LAYERS)
        assert parse_strategy(name).memory_need(fit.workers - 1, LAYERS) > 0.75 * 160 * MIB


def test_a_refusal_names_need_limit_and_ways_out():
    text = refusal(parse_strategy("data"), 2, LAYERS, 200 * MIB)
    assert "200.0 MiB" in text and "323.0 MiB" in text and "strategy=data" in text
    assert "sharded with 3 workers needs" in text and "pipeline with 3 workers needs 123.0 MiB each" in text
    assert refusal(parse_strategy("data"), 2, LAYERS, 323 * MIB) == ""


def test_nothing_is_advised_that_does_not_fit():
    assert "allow more memory" in advice(LAYERS, 10 * MIB, 2)
