"""The crew: what is known of the run's progress, whoever tells it."""

from __future__ import annotations

import pytest

from shoal.launch.crew import Crew
from shoal.observe.happenings import Done, Heartbeat, StateEntered, StepsTaken
from shoal.spec import World
from shoal.spec.told import Told
from shoal.spec.vocabulary import State


@pytest.mark.parametrize(
    "word",
    [
        Heartbeat(step=8),
        StateEntered(state=State.TRAINING, step=8),
        StepsTaken(steps=[[7, 0.3], [8, 0.2]], samples=80),
    ],
)
def test_a_step_forward_forgives_losses_whichever_word_tells_of_it(word: Told) -> None:
    crew = Crew(top_step=7, fruitless_losses=3)
    hand = crew.welcome(World(), 0.0)
    crew.note_life(hand, Heartbeat(step=7), 1.0)
    assert crew.fruitless_losses == 3, "nothing has moved"
    crew.note_life(hand, word, 2.0)
    assert (crew.top_step, crew.fruitless_losses) == (8, 0)


def test_the_last_loss_is_the_first_workers_unless_it_told_none() -> None:
    crew = Crew()
    first, other = crew.welcome(World(), 0.0), crew.welcome(World(global_rank=1, world_size=2), 0.0)
    crew.note_life(other, Done(results={"loss": 0.5}), 1.0)
    assert crew.last_loss == 0.5
    crew.note_life(first, StepsTaken(steps=[[7, 0.3], [8, None]], samples=80), 2.0)
    crew.note_life(other, Done(results={"loss": 0.7}), 3.0)
    assert crew.last_loss == 0.3
