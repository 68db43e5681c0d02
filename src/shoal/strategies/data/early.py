"""Chunks of gradients that are complete while the backward pass goes on to the layers before."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from shoal.strategies.data.update import ChunkUpdate


class EarlyChunks:
    """Hands each chunk on as soon as one pass has made the gradients of all its parameters."""

    def __init__(
        self, chunks: Iterable[tuple[int, ChunkUpdate]], hand_on: Callable[[int, ChunkUpdate], None]
    ) -> None:
        self._chunks = dict(chunks)
        self._hand_on = hand_on
        self._of_param: defaultdict[int, list[int]] = defaultdict(list)
        for number, chunk in self._chunks.items():
            for param in chunk.params:
                self._of_param[param].append(number)
        self._awaited: Counter[int] = Counter()
        """By chunk: how many parameters have no gradient yet."""

    def begin(self) -> None:
        """A backward pass begins."""
        self._awaited = Counter({number: len(chunk.params) for number, chunk in self._chunks.items()})

    def on_taken(self, param: int) -> None:
        """A parameter's gradient is complete."""
        for number in self._of_param[param]:
            self._awaited[number] -= 1
            if not self._awaited[number]:
                self._hand_on(number, self._chunks[number])
