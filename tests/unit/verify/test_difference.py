"""How far two sets of tensors are apart."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.verification.difference import difference, same_bits


def test_equal_bits_are_no_difference():
    tensors = {"weight": torch.randn(4, 3), "count": torch.tensor(7), "empty": torch.zeros(0)}

    found = difference(tensors, {name: tensor.clone() for name, tensor in tensors.items()})

    assert (found.relative, found.bitwise, found.worst) == (0.0, True, "")


def test_difference_is_relative_to_the_largest_of_its_tensor():
    expected = {"small": torch.tensor([1.0, -2.0]), "large": torch.tensor([100.0, 0.0])}
    found = difference({"small": torch.tensor([1.0, -2.5]), "large": torch.tensor([100.0, 1.0])}, expected)

    assert found.relative == pytest.approx(0.25)
    assert found.worst == "small"
    assert not found.bitwise


def test_noise_around_zero_is_judged_by_the_scale_of_its_kind():
    expected = {"a/momentum": torch.tensor([1.0]), "b/momentum": torch.tensor([1e-12])}
    ours = {"a/momentum": torch.tensor([1.0]), "b/momentum": torch.tensor([-1e-12])}

    by_itself = difference(ours, expected, lambda name: name)
    among_its_kind = difference(ours, expected, lambda name: name.partition("/")[2])

    assert by_itself.relative == pytest.approx(2.0)
    assert among_its_kind.relative == pytest.approx(2e-10)


@pytest.mark.parametrize(
    "found",
    [torch.tensor([math.nan, 1.0]), torch.tensor([math.inf, 1.0]), torch.ones(3), torch.ones(2).double()],
    ids=["nan", "infinite", "shape", "dtype"],
)
def test_what_cannot_be_measured_is_infinitely_far(found: torch.Tensor):
    assert difference({"w": found}, {"w": torch.ones(2)}).relative == math.inf


def test_a_missing_name_is_told():
    found = difference({"weight": torch.ones(1)}, {"weight": torch.ones(1), "bias": torch.ones(1)})

    assert found.relative == math.inf
    assert found.worst == "bias (only in one process)"


def test_zero_and_minus_zero_differ_in_bits_but_not_in_value():
    found = difference({"w": torch.tensor([-0.0])}, {"w": torch.tensor([0.0])})

    assert (found.relative, found.bitwise, found.worst) == (0.0, False, "w")
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
