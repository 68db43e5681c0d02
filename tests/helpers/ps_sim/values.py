"""A shard's values as one number that depends on every update and on their order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shoal.comm.codec import Frame
from shoal.ps.messages import Push

WIDTH = 8
_MASK = (1 << 8 * WIDTH) - 1


def gradient(shard: int, cells: Sequence[int], version: int) -> bytes:
    """What a worker computes from these cells and this version of the shard."""
    return _number(shard, version, *cells).to_bytes(WIDTH, "little")


class ChainValues:
    """The `ShardValues` of the simulation."""

    def __init__(self, shard: int) -> None:
        self.chain = shard + 1
        self.cells: list[int] = []
        """Every cell that went in, as often as it did."""
        self._marked: int | None = None

    def fits(self, push: Push) -> bool:
        return len(push.frames) == 1 and len(push.frames[0]) == WIDTH

    def step(self, gradients: Sequence[Push], *, scale: float, lr_scale: float, loss: float, last: bool) -> None:
        self._mix(gradients, scale, lr_scale, loss, last)

    def average(self, pushes: Sequence[Push], *, share: float) -> None:
        self._mix(pushes, share)

    def parts(self, *, whole: bool) -> Iterable[Sequence[Frame]]:
        packed = self.chain.to_bytes(WIDTH, "little")
        return [(packed,)] if whole else [(packed[:4],), (packed[4:],)]

    def frames(self) -> tuple[tuple[Frame, ...], dict[str, Any]]:
        return (self.chain.to_bytes(WIDTH, "little"),), {"cells": list(self.cells), "marked": self._marked}

    def load(self, frames: Sequence[Frame], facts: dict[str, Any]) -> None:
        self.chain = int.from_bytes(bytes(frames[0]), "little")
        self.cells = list(facts["cells"])
        self._marked = facts["marked"]

    def mark(self) -> None:
        self._marked = self.chain

    def rollback(self) -> bool:
        if self._marked is None:
            return False
        self.chain = self._marked
        return True

    def digest(self) -> str:
        return f"{self.chain:016x}"

    def _mix(self, pushes: Sequence[Push], *how: float) -> None:
        numbers = (int.from_bytes(bytes(push.frames[0]), "little") for push in pushes)
        self.chain = _number(self.chain, *numbers, *how)
        for push in pushes:
            self.cells.extend(push.cells)


def _number(*parts: float) -> int:
    # Tuples of numbers hash alike in every process; text would not.
    return hash(parts) & _MASK
