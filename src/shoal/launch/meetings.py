"""Where workers of several hosts meet: each leaves a text under a name, and all get everybody's. No I/O."""

from __future__ import annotations

from collections import defaultdict

from shoal.comm.words import PARTING, Announced, MetAll
from shoal.launch.crew import Hand
from shoal.launch.succession import Bridge


class Meetings:
    """A part of the supervisor's machine. Who follows a worker that died announces anew."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._left: dict[str, dict[int, tuple[Hand, str]]] = defaultdict(dict)
        """By name and rank: who waits, and what it has left."""
        self.is_parting = False
        """Whether all have come to the end: from then on nobody needs another any more."""

    def hear(self, hand: Hand, word: Announced) -> None:
        """A worker has come; the last one lets all go on."""
        _, _, generation = word.name.partition("@")
        if generation and int(generation) < self._bridge.crew.generation:
            return  # Whom it would meet has been told to meet others.
        there = self._left[word.name]
        there[hand.global_rank] = hand, word.text
        if sum(len(one.places) for one, _ in there.values()) < self._bridge.job.cluster.places:
            return
        del self._left[word.name]
        self.is_parting = self.is_parting or word.name.startswith(PARTING)
        texts = [text for _, (_, text) in sorted(there.items(), key=lambda one: one[0])]
        for waiting, _ in there.values():
            self._bridge.say(waiting, MetAll(name=word.name, texts=texts))
