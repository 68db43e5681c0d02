"""What the threads of a pool add up: nothing is lost between them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from shoal.step.compute import Sums
from shoal.strategies.ps.pool import GradientSum


def a_sum(*shapes: int) -> tuple[GradientSum, list[torch.Tensor], np.ndarray]:
    views, touched = [torch.full((size,), 99.0) for size in shapes], np.zeros(len(shapes), dtype=np.uint8)
    return GradientSum(views, touched), views, touched


def test_threads_lose_nothing() -> None:
    total, views, _ = a_sum(5000)

    def add(number: int) -> None:
        total.add([torch.full((5000,), float(number))])
        total.count(Sums(float(number), 2.0, parts=(1.0, float(number))))

    with ThreadPoolExecutor(8, thread_name_prefix="shoal-test") as threads:
        list(threads.map(add, range(200)))
    assert views[0].unique().tolist() == [sum(range(200))]
    assert total.sums == Sums(sum(range(200)), 400.0, parts=(200.0, sum(range(200))))


def test_parameters_without_gradient_are_not_touched() -> None:
    total, views, touched = a_sum(2, 3)
    total.add([torch.ones(2), None])
    total.add([torch.ones(2), None])
    assert touched.tolist() == [1, 0]
    assert views[0].tolist() == [2.0, 2.0]
    assert views[1].tolist() == [99.0] * 3, "nobody reads what was not touched"


def test_sparse_gradients_become_dense() -> None:
    total, views, _ = a_sum(3)
    sparse = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (3,), check_invariants=True)
    total.add([sparse])
    total.add([torch.ones(3)])
    assert views[0].tolist() == [1.0, 6.0, 1.0]
