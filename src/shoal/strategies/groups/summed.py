"""What slots bring to each other where processes can only add up: each fills its own part of many zeros."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from shoal.arena.tensors import as_bytes
from shoal.errors import TaskError
from shoal.model.gathering import Question
from shoal.step.passes import Brought
from shoal.strategies.groups.looks import LOOK_WORDS, look_of, seen_in

_WORD = 16
"""Bytes; a multiple of every element's."""


class SummedSwap:
    """First all tell what they bring, or that they have ended, so that nobody waits for what does not come."""

    def __init__(self, slots: int, sum_: Callable[[torch.Tensor], object]) -> None:
        """`sum_` adds up a flat tensor over all processes, in place."""
        self._slots = slots
        self._sum = sum_
        self._is_used: bool | None = None
        """Whether steps gather; None before the first is over. Where they do not, no end has to be told."""

    def begin(self, step: int, slots: Sequence[int]) -> None:
        self._has_gathered = False

    def swap(self, brought: Mapping[int, Brought]) -> Sequence[Brought | None]:
        first = next(iter(brought.values()))
        if first.question is Question.SUMS:  # the same shape everywhere, in every step
            return [Brought(Question.SUMS, values) for values in self._rows(brought, first.values)]
        if self._is_used is False:
            raise TaskError(
                "shoal.gather must be called in every step from the first on, which it was not called in; call "
                "it whatever is in a batch."
            )
        self._has_gathered = True
        looks = self._tell(brought)
        found = [seen_in(look) if look[0] else None for look in looks]
        if any(each is None or each[0] != first.question for each in found):
            return [None if each is None else Brought(Question(each[0]), first.values) for each in found]
        counts = [math.prod(shape) * dtype.itemsize for _, dtype, shape in filter(None, found)]
        flat = torch.zeros(sum(map(_padded, counts)), dtype=torch.uint8, device=first.values.device)
        rooms = [room[:count] for room, count in zip(flat.split(list(map(_padded, counts))), counts, strict=True)]
        for slot, own in brought.items():
            rooms[slot].copy_(as_bytes(own.values.contiguous()))
        self._fill_in(flat)
        return [
            Brought(first.question, room.view(dtype).view(shape))
            for room, (_, dtype, shape) in zip(rooms, filter(None, found), strict=True)
        ]

    def left(self, slot: int) -> None:
        """All of this process's slots end together."""

    def end(self) -> Mapping[int, Brought]:
        if self._is_used is False:
            return {}
        self._is_used = self._has_gathered
        asks = {slot: look[0] for slot, look in enumerate(self._tell({})) if look[0]}
        return {slot: Brought(Question(question), torch.empty(0)) for slot, question in asks.items()}

    def _tell(self, brought: Mapping[int, Brought]) -> list[list[int]]:
        """By slot: what what it brings looks like; zeros where it has ended."""
        looks = torch.zeros(self._slots, LOOK_WORDS, dtype=torch.int64)
        for slot, own in brought.items():
            looks[slot] = torch.tensor(look_of(own))
        self._fill_in(looks.view(-1))
        found: list[list[int]] = looks.tolist()
        return found

    def _fill_in(self, tensor: torch.Tensor) -> None:
        """Have what others have where this process has zeros. Sums take floats alone, and those of 32 bits hold
        every whole number of 16: so each bit comes through."""
        halves = tensor.view(torch.int16)
        sums = halves.float()
        self._sum(sums)
        halves.copy_(sums)

    def _rows(self, brought: Mapping[int, Brought], like: torch.Tensor) -> Sequence[torch.Tensor]:
        rows = torch.zeros(self._slots, like.numel(), dtype=like.dtype, device=like.device)
        for slot, own in brought.items():
            rows[slot] = own.values.reshape(-1)
        self._sum(rows.view(-1))
        return [row.view(like.shape) for row in rows]


def _padded(count: int) -> int:
    return -(-count // _WORD) * _WORD
