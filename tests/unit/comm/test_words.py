"""What a supervisor and its processes say to each other survives the channel; the rest is told apart."""

from __future__ import annotations

import pytest

from shoal.comm.channel import Channel
from shoal.comm.words import (
    FROM_PROCESSES,
    TO_PROCESSES,
    Adopt,
    Announced,
    AwaitDeal,
    Coordinate,
    CoordinatorMoved,
    Garbled,
    MemberLeft,
    MemberLost,
    MembersLiving,
    MetAll,
    Misbehave,
    Ordered,
    OrderedAction,
    Redeal,
    Release,
    ScaleAnswered,
    ScaleWanted,
    StacksOffered,
    Stop,
    Takeover,
    understood,
)
from shoal.observe.happenings import Done, Happening
from shoal.spec.told import Told
from shoal.spec.vocabulary import Role

SAID = [
    StacksOffered(signal=43, pid=7, fd=5),
    Ordered(action=OrderedAction.START, role=Role.WORKER, rank=2),
    Ordered(action=OrderedAction.END, role=Role.SERVER, rank=1, node=4),
    ScaleAnswered(text="No.", is_refused=True),
    ScaleAnswered(text="2 workers.", workers=2, servers=0),
    Announced(name="addresses", text="tcp://10.0.0.1:6"),
    Done(results={"steps": 5, "shares": {0: 1.5}}, memory={"host": 10}),
]
TOLD = [
    Stop(),
    Takeover(places=[1], generation=2),
    Adopt(places=[1, 2], generation=3),
    Redeal(deal=[[0, 1], [2]], hosts=[1, 0, 1], member=1, generation=3),
    Redeal(deal=[[0], [1], [2]], hosts=[1, 2], member=0, generation=4, torn=[1]),
    AwaitDeal(),
    Release(places=[], generation=4),
    Misbehave(fault="slow", factor=4.0, seconds=None),
    MemberLost(node=4, role=Role.SERVER, rank=1),
    MemberLeft(node=3, role=Role.WORKER, rank=0),
    MembersLiving(members=[{"node": 1, "role": "server", "rank": 0}], left=[]),
    ScaleWanted(workers=3),
    MetAll(name="addresses", texts=["tcp://10.0.0.1:6", "tcp://10.0.0.2:7"]),
    CoordinatorMoved(address="tcp://10.0.0.2:5000"),
    Coordinate(coordinator="tcp://10.0.0.2:5000"),
]


def test_all_words_are_listed_here() -> None:
    assert {word.kind_name for word in TOLD} == TO_PROCESSES.keys()
    others = {word.kind_name for word in SAID if not isinstance(word, Happening)}
    assert others == {name for name, kind in FROM_PROCESSES.items() if not issubclass(kind, Happening)}


@pytest.mark.parametrize(
    ("word", "kinds"), [*((word, FROM_PROCESSES) for word in SAID), *((word, TO_PROCESSES) for word in TOLD)]
)
def test_every_word_survives_the_channel(word: Told, kinds: dict[str, type[Told]]) -> None:
    ours, theirs = Channel.pair()
    ours.send(word.as_message())
    message = theirs.poll()
    assert message is not None and understood(message, kinds) == word
    for end in (ours, theirs):
        end.close()


def test_the_same_name_means_something_else_in_the_other_direction() -> None:
    message = MemberLost(node=4, role=Role.SERVER, rank=1).as_message()
    assert understood(message, TO_PROCESSES) == MemberLost(node=4, role=Role.SERVER, rank=1)
    assert isinstance(understood(message, FROM_PROCESSES), Garbled), "a loss that is told has a reason"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({}, "None"),
        ({"kind": "rumour"}, "'rumour'"),
        ({"kind": {}}, "{}"),
        ({"kind": "adopt", "places": [1]}, "generation"),
        ({"kind": "adopt", "places": "all", "generation": 1}, "'all'"),
        ({"kind": "adopt", "places": ["all"], "generation": 1}, "'all'"),
        ({"kind": "lost", "node": 1, "role": "king", "rank": 0}, "king"),
        ({"kind": "living", "members": [3], "left": []}, "3"),
        ({"kind": "x" * 1000}, "…"),
    ],
)
def test_what_means_nothing_says_why(message: dict[str, object], says: str) -> None:
    word = understood(message, TO_PROCESSES)
    assert isinstance(word, Garbled) and says in word.text and len(word.text) < 200
