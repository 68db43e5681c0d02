"""Whatever a model returns, what there is for each sample becomes its row."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from shoal.errors import SpecError
from shoal.roles.inference.rows import ONLY, rows_of

SCORES, PLACES, LOSS = torch.arange(6.0).view(3, 2), torch.arange(3), torch.tensor(0.5)


class Named(NamedTuple):
    scores: torch.Tensor
    loss: torch.Tensor


@dataclass
class Fields:
    scores: torch.Tensor
    cache: Any = None


@pytest.mark.parametrize(
    "result",
    [
        SCORES,
        SCORES.to(torch.bfloat16),
        {"loss": LOSS, "logits": SCORES},
        Named(SCORES, LOSS),
        Fields(SCORES),
        [SCORES],
    ],
    ids=lambda result: type(result).__name__,
)
def test_one_output_has_no_name(result: Any) -> None:
    rows = rows_of(result, 3)
    assert rows.keys() == {ONLY} and rows[ONLY].tolist() == SCORES.tolist()


def test_several_outputs_go_by_their_names() -> None:
    rows = rows_of(OrderedDict(loss=LOSS, logits=SCORES, places=PLACES, states=(SCORES, SCORES)), 3)
    assert {name: array.tolist() for name, array in rows.items()} == {
        "logits": SCORES.tolist(),
        "places": PLACES.tolist(),
    }
    assert rows_of((SCORES, LOSS, PLACES), 3).keys() == {"0", "2"}


def test_outputs_of_transformers() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    rows = rows_of(outputs.SequenceClassifierOutput(loss=LOSS, logits=SCORES, hidden_states=(SCORES,)), 3)
    assert rows.keys() == {ONLY} and rows[ONLY].tolist() == SCORES.tolist()


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (LOSS, r"shape \(\)"),
        (SCORES[1:], r"shape \(2, 2\)"),
        ({"loss": LOSS}, "dict"),
        ([LOSS], "list"),
        (None, "None"),
    ],
)
def test_what_is_no_row_per_sample_is_refused(result: Any, found: str) -> None:
    with pytest.raises(SpecError, match=f"for 3 samples the model returned {found}.*; let the model"):
        rows_of(result, 3)
