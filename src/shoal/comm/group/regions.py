"""What a group keeps in the memory that its processes share: how much, and which counter is where."""

from __future__ import annotations

from shoal.arena import counter_bytes, segment_bytes

BUFFER_BYTES = 1 << 20
"""Of one of the two buffers that a process fills for the others: what is larger goes in several rounds. Small
enough to be still in the cache of a core when the others read it."""
MOST_LETTERS = 64
"""That a process may have posted to another before the first is taken."""
LETTER_NUMBERS = 8
_LETTER_BYTES = 8 * LETTER_NUMBERS


def group_regions(size: int) -> dict[str, int]:
    """By name: the bytes of each region of a group of so many."""
    return {
        "counters": counter_bytes(GroupMarks(size).count),
        "letters": _LETTER_BYTES * MOST_LETTERS * size * size,
        **{buffers_of(index): 2 * BUFFER_BYTES for index in range(size)},
    }


def group_bytes(size: int) -> int:
    """The bytes that a group of so many takes on its host. Crates of letters under way come on top: as many as a
    pipeline has between two stages."""
    return 0 if size == 1 else segment_bytes(group_regions(size).values())


def buffers_of(index: int) -> str:
    """The region with the buffers that one process fills."""
    return f"buffers/{index}"


class GroupMarks:
    """The counters of a group, by what has happened. One writer each; they only rise."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.posted = range(size)
        """By process: the last round for which it has filled its buffer."""
        self.folded = range(size, 2 * size)
        """By process: the last round of which its share of the result is in its buffer."""
        self.left = range(2 * size, 3 * size)
        """By process: the last round of which it needs nothing any more."""
        self.count = 3 * size + 2 * size * size

    def sent(self, sender: int, receiver: int) -> int:
        """Letters that one has posted to the other."""
        return 3 * self._size + 2 * (sender * self._size + receiver)

    def taken(self, sender: int, receiver: int) -> int:
        """Letters of one that the other has taken."""
        return self.sent(sender, receiver) + 1
