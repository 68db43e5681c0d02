"""Whether a loss ran away, as far as the first worker's losses and the test set can say."""

from __future__ import annotations

import math

import pytest

from shoal.observe import Event
from shoal.observe.happenings import StepsTaken
from shoal.verification.by_result import Watched


@pytest.mark.parametrize(
    ("losses", "tested", "sentence"),
    [
        ([1.0, 0.5, 0.2], 0.3, ""),
        ([1.0, 0.5, 40.0], None, "The loss ran away: 40 at the end"),
        ([1.0, 1.1], 60.0, "The loss ran away: 60 on the test set at the end"),
        ([1.0, 1.1], math.nan, "The loss ran away: nan on the test set at the end"),
        ([1.0, 1.1], 1.2, ""),
        ([1.0, 0.1], 3.0, ""),  # it has learnt by heart, and that alone
        ([], 60.0, ""),
    ],
)
def test_a_first_worker_of_few_steps_does_not_hide_it(
    losses: list[float], tested: float | None, sentence: str
) -> None:
    watched = Watched()
    told = [[step, loss] for step, loss in enumerate(losses, 1)]
    watched.take(Event(StepsTaken(steps=told, parts=[], samples=8, total_steps=12, lr=0.1, epoch=1), 0))
    found = watched.divergence(1.0, tested=tested)
    assert found.startswith(sentence) and bool(found) == bool(sentence)
