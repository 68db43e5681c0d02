"""What a loss is told with: the same names each time, one number each."""

from __future__ import annotations

import pytest
import torch

from shoal.errors import TaskError
from shoal.model.loss_parts import LossParts
from shoal.spec.task import MOST_LOSS_PARTS

LOSS = torch.tensor(1.0)


def test_the_first_dict_says_the_order() -> None:
    parts = LossParts(())
    value = torch.tensor([2.0], requires_grad=True)
    assert parts.of({"ce": value, "loss": LOSS, "kl": 3})[1] == 3.0 and parts.names == ("ce", "kl")
    swapped = parts.of({"kl": 5.0, "ce": value, "loss": LOSS})
    assert float(swapped[0]) == 2.0 and swapped[1] == 5.0
    assert not swapped[0].requires_grad, "its history would keep all of the pass"


def test_a_bare_loss_is_told_alone() -> None:
    parts = LossParts(())
    assert parts.of(LOSS) == parts.of({"loss": LOSS}) == () and parts.names == ()


@pytest.mark.parametrize("other", [LOSS, {"loss": LOSS}, {"loss": LOSS, "ce": 1.0, "kl": 1.0}, {"kl": 1.0}])
def test_other_names_later_are_refused(other: object) -> None:
    parts = LossParts(())
    parts.of({"loss": LOSS, "ce": 1.0})
    with pytest.raises(TaskError, match="the same names for every batch"):
        parts.of(other)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"ce": torch.zeros(3)}, r"one number each, found shape \(3,\) for 'ce'"),
        ({"ce": None}, "found NoneType for 'ce'"),
        ({"accuracy": 0.5}, "'accuracy', which is a metric's name, too"),
        ({3: 0.5}, "which is no text"),
        ({f"part{number}": 0.0 for number in range(MOST_LOSS_PARTS + 1)}, "found 9: part0"),
    ],
)
def test_what_cannot_be_told_is_refused(found: dict, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        LossParts({"accuracy"}).of({"loss": LOSS, **found})


def test_those_who_compute_no_loss_learn_the_names() -> None:
    parts = LossParts(())
    parts.learn(["ce", "kl"])
    assert parts.names == ("ce", "kl") and parts.are_common
