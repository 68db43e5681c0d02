"""The tap: gradients land in the views, whatever produced them."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from shoal.step.tap import GradientTap


def _tapped(params: list[nn.Parameter]) -> tuple[GradientTap, list[torch.Tensor], np.ndarray]:
    tap = GradientTap(params)
    views = [torch.full_like(p, 99.0) for p in params]
    touched = np.zeros(len(params), dtype=np.uint8)
    tap.aim(views, touched)
    return tap, views, touched


def test_gradients_are_taken_and_not_left() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    tap, views, touched = _tapped([used, unused])
    (used * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert views[0].tolist() == [1.0, 2.0, 3.0]
    assert touched.tolist() == [1, 0]
    assert views[1].tolist() == [99.0, 99.0], "nobody reads what was not touched"
    assert used.grad is None
    tap.close()
    used.sum().backward()
    assert used.grad is not None and views[0].tolist() == [1.0, 2.0, 3.0]


def test_batches_accumulate_until_the_next_aim() -> None:
    param = nn.Parameter(torch.zeros(2))
    tap, views, touched = _tapped([param])
    for _ in range(3):
        param.sum().backward()
    assert views[0].tolist() == [3.0, 3.0]
    tap.aim(views, touched)
    param.sum().backward()
    assert views[0].tolist() == [1.0, 1.0]


def test_tied_weights_count_once_with_both_uses() -> None:
    table = nn.Embedding(5, 3)
    head = nn.Linear(3, 5, bias=False)
    head.weight = table.weight
    tokens = torch.tensor([1, 1, 4])
    F.cross_entropy(head(table(tokens)), tokens).backward()
    expected, table.weight.grad = table.weight.grad.clone(), None
    _, views, touched = _tapped([table.weight])
    F.cross_entropy(head(table(tokens)), tokens).backward()
    assert torch.equal(views[0], expected) and touched.tolist() == [1]


def test_sparse_gradients_become_dense() -> None:
    sparse = nn.Embedding(6, 2, sparse=True)
    dense = nn.Embedding(6, 2, _weight=sparse.weight.detach().clone())
    _, views, _ = _tapped([sparse.weight])
    for tokens in (torch.tensor([1, 1, 3]), torch.tensor([3, 5])):
        sparse(tokens).square().sum().backward()
        dense(tokens).square().sum().backward()
    assert torch.allclose(views[0], dense.weight.grad)


def test_strides_are_kept() -> None:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 5, 5)
    conv(x).square().sum().backward()
    expected, conv.weight.grad = conv.weight.grad.clone(), None
    _, views, _ = _tapped([conv.weight])
    conv(x).square().sum().backward()
    assert torch.equal(views[0], expected)
