"""The loss of a vocabulary in pieces is the loss of the whole, and so are its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.errors import SpecError
from shoal.model.scores import Scores, is_taken_in_pieces, stand_in, take_back
from shoal.model.vocabulary_loss import linear_cross_entropy, piece_rows

WORDS, WIDTH = 37, 8


def case(rows: int = 23, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, WIDTH, generator=generator, dtype=dtype).requires_grad_()
    layer = nn.Linear(WIDTH, WORDS, dtype=dtype)
    target = torch.randint(0, WORDS, (rows,), generator=generator)
    target[::5] = -100
    return hidden, layer, target


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("has_bias", [True, False])
def test_losses_and_gradients_are_those_of_the_whole(reduction: str, rows: int, has_bias: bool) -> None:
    hidden, layer, target = case()
    bias = layer.bias if has_bias else None
    inputs = [hidden, layer.weight, *([bias] if bias is not None else [])]
    expected = F.cross_entropy(F.linear(hidden, layer.weight, bias), target, reduction=reduction)
    found = linear_cross_entropy(hidden, layer.weight, target, bias, reduction=reduction, rows=rows)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(3 * expected, inputs)
    for one, other in zip(torch.autograd.grad(3 * found, inputs), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_a_frozen_weight_gets_no_gradient() -> None:
    hidden, layer, target = case()
    layer.requires_grad_(False)
    linear_cross_entropy(hidden, layer.weight, target).backward()
    assert layer.weight.grad is None and hidden.grad is not None


def test_in_half_precision_it_is_as_close_as_the_whole() -> None:
    hidden, layer, target = case(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        whole = F.cross_entropy(layer(hidden), target)
        found = linear_cross_entropy(hidden, layer.weight, target, layer.bias, rows=5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, whole, rtol=1e-2, atol=0.0)
    (gradient,) = torch.autograd.grad(found, layer.weight)
    (expected,) = torch.autograd.grad(whole, layer.weight)
    assert gradient.dtype == torch.float32
    assert float((gradient - expected).norm() / expected.norm()) < 3e-2


def test_bad_input_gets_a_sentence() -> None:
    hidden, layer, target = case()
    with pytest.raises(SpecError, match="reduction must be mean or sum"):
        linear_cross_entropy(hidden, layer.weight, target, reduction="none")
    with pytest.raises(SpecError, match="a row for each target"):
        linear_cross_entropy(hidden, layer.weight, target[:-1])


def test_pieces_are_powers_of_two() -> None:
    assert piece_rows(50304, "cpu") == 64 and piece_rows(50304, "cuda") == 8192
    assert piece_rows(2048, "cpu") == 1024


WAYS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "flat": lambda scores, target: F.cross_entropy(scores.flatten(0, 1), target.flatten()),
    "view": lambda scores, target: F.cross_entropy(scores.view(-1, scores.size(-1)), target.view(-1)),
    "shifted": lambda scores, target: F.cross_entropy(
        scores[..., :-1, :].contiguous().reshape(-1, WORDS), target[:, 1:].reshape(-1)
    ),
    "float": lambda scores, target: nn.CrossEntropyLoss()(scores.float().reshape((-1, WORDS)), target.flatten()),
    "smoothed": lambda scores, target: F.cross_entropy(
        scores.flatten(0, 1), target.flatten(), label_smoothing=0.1
    ),
    "by hand": lambda scores, target: -F.log_softmax(scores, -1).gather(-1, target[..., None]).mean(),
    "scaled": lambda scores, target: F.cross_entropy((scores / 2.0).flatten(0, 1), target.flatten()),
    "words first": lambda scores, target: F.cross_entropy(scores.transpose(1, 2), target),
}
IN_PIECES = {"flat", "view", "shifted", "float"}


@pytest.mark.parametrize("way", WAYS)
def test_scores_do_what_a_tensor_does(way: str) -> None:
    layer = nn.Linear(WIDTH, WORDS)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(2, 6, WIDTH, generator=generator)
    target = torch.randint(0, WORDS, (2, 6), generator=generator)
    loss = WAYS[way]
    expected = loss(layer(hidden), target)
    (wanted,) = torch.autograd.grad(expected, layer.weight)
    assert is_taken_in_pieces(layer, lambda: loss(layer(hidden), target)) == (way in IN_PIECES)
    stand_in(layer)
    assert isinstance(layer(hidden), Scores)
    found = loss(layer(hidden), target)
    take_back(layer)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, layer.weight)[0], wanted)


def test_evaluation_gets_a_tensor() -> None:
    layer = nn.Linear(WIDTH, WORDS)
    stand_in(layer)
    with torch.no_grad():
        assert isinstance(layer(torch.zeros(2, WIDTH)), torch.Tensor)
    assert isinstance(layer.eval()(torch.zeros(2, WIDTH)), torch.Tensor)
