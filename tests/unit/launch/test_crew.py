"""The crew: what is known of the run's progress, whoever tells it."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.launch.crew import Crew
from shoal.spec import World


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "beat", "step": 8},
        {"kind": "state", "state": "training", "step": 8},
        {"kind": "steps", "steps": [[7, 0.3], [8, 0.2]], "samples": 80},
    ],
)
def test_a_step_forward_forgives_losses_whichever_message_tells_of_it(message: dict[str, Any]) -> None:
    crew = Crew(top_step=7, fruitless_losses=3)
    hand = crew.welcome(World(), 0.0)
    crew.note_life(hand, {"kind": "beat", "step": 7}, 1.0)
    assert crew.fruitless_losses == 3, "nothing has moved"
    crew.note_life(hand, message, 2.0)
    assert (crew.top_step, crew.fruitless_losses) == (8, 0)
