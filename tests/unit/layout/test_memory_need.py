"""What a worker needs under each strategy, and what is advised where that is too much."""

import pytest

from shoal.layout.memory_need import advice, fitting, refusal
from shoal.spec import parse_strategy
from shoal.spec.cut_footprint import cut_evenly
from shoal.spec.model_size import ModelSize, RunSize

MIB = 1 << 20
LAYERS = ModelSize(trained=(10 * MIB,) * 8, buffers=3 * MIB, mirrored=("exp_avg", "exp_avg_sq"))
"""80 MiB of parameters: with gradients and two values for each element, 320 MiB."""


def need(strategy, workers):
    run = RunSize(workers=workers, slots=workers, is_limited=True)
    return parse_strategy(strategy).footprint(LAYERS, run).worker_bytes


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
    fits = {fit.strategy: fit for fit in fitting(LAYERS, RunSize(), 160 * MIB, workers=2)}
    assert {name: fit.workers for name, fit in fits.items()} == {"sharded": 4, "pipeline": 4}
    for name, fit in fits.items():
        assert fit.num_bytes == need(name, fit.workers)
        assert need(name, fit.workers - 1) > 0.75 * 160 * MIB


def test_a_refusal_names_need_limit_what_it_is_for_and_ways_out():
    spec, run = parse_strategy("data:via=ring"), RunSize(workers=2, slots=2)
    found = spec.footprint(LAYERS, run)
    text = refusal(spec, found, LAYERS, run, 200 * MIB)
    assert "200.0 MiB" in text and "339.0 MiB" in text and "strategy=data:via=ring" in text
    assert "optimizer state (160.0 MiB), parameters (80.0 MiB), gradients (80.0 MiB)" in text
    assert "sharded with 3 workers needs" in text and "pipeline with 3 workers needs 123.0 MiB each" in text
    assert refusal(spec, found, LAYERS, run, found.worker_bytes) == ""


def test_nothing_is_advised_that_does_not_fit():
    assert "allow more memory" in advice(LAYERS, RunSize(), 10 * MIB, 2)
