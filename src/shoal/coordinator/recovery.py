"""What a coordinator that takes over must hear before it hands out cells again."""

from __future__ import annotations

from collections.abc import Iterable


class Recovery:
    """Who has to speak under the new view: every worker that was there, about its cells, and every shard."""

    def __init__(self, view_number: int, workers: Iterable[int], num_shards: int) -> None:
        self._view_number = view_number
        self._workers = set(workers)
        self._current: set[int] = set()
        self._shards = set(range(num_shards))

    @property
    def is_over(self) -> bool:
        """Whether all have spoken."""
        return not self._workers and not self._shards

    def on_report(self, node: int, view_number: int, shards: Iterable[int]) -> None:
        """A member reported. What it sent under an older view may be out of date and does not count."""
        if view_number >= self._view_number:
            self._current.add(node)
            self._shards.difference_update(shards)

    def on_request(self, node: int) -> None:
        """A worker said what it holds. It keeps the order of its messages, so this came after its report."""
        if node in self._current:
            self._workers.discard(node)

    def on_lost(self, node: int) -> None:
        """Nobody waits for the dead."""
        self._workers.discard(node)
