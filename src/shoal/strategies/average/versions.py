"""What was agreed on before: clients that nobody waits for have begun from there."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shoal.arena import Segment
from shoal.strategies.average.values import AgreedValues
from shoal.strategies.groups.vectors import Vectors


class VersionRing:
    """The last few, in the host's memory, by how many agreements led to them."""

    def __init__(self, segment: Segment, values: AgreedValues, count: int) -> None:
        self._values = values
        self._rooms = segment.tensor("versions", torch.uint8).view(count, -1)
        self._numbers = segment.tensor("version numbers", torch.int64)
        """Each one more than the number of what lies there; 0: nothing does."""

    def put(self, number: int, agreed: Mapping[torch.dtype, torch.Tensor]) -> None:
        """In the place of one that nobody begins from any more."""
        room = number % len(self._rooms)
        for kind, vector in self._values.views(self._rooms[room]).items():
            vector.copy_(agreed[kind])
        self._numbers[room] = number + 1

    def find(self, number: int) -> Vectors | None:
        """None where it is not kept: so far back the run does not go, or other workers counted otherwise."""
        room = number % len(self._rooms)
        return self._values.views(self._rooms[room]) if self._numbers[room] == number + 1 else None
