"""A sum over processes that share no memory, which goes on while they do something else."""

from __future__ import annotations

import torch

from shoal.comm.group.base import flat_in_host, sum_in_order, write_back
from shoal.comm.group.mailroom import Mailroom

_FIRST_TAG = -10
"""Others that are below zero are those of what all say together."""


class SumAhead:
    """Parts go straight to one process, which adds them up in the order of ranks and sends the total to all. Who
    that is follows from the number of the sum: of many each process makes as many."""

    def __init__(
        self, mail: Mailroom, ranks: tuple[int, ...], index: int, tensor: torch.Tensor, number: int
    ) -> None:
        self._mail, self._ranks, self._index = mail, ranks, index
        self._tensor, self._flat = tensor, flat_in_host(tensor)
        self._tag = _FIRST_TAG - number
        self._maker = number % len(ranks)
        self._others = [other for other in range(len(ranks)) if other != index]
        self._is_made = False
        if index != self._maker:
            self._send(self._flat, self._maker)

    def advance(self) -> None:
        if self._index == self._maker and not self._is_made and all(map(self._has_come, self._others)):
            self._make()

    def wait(self) -> None:
        if self._index != self._maker:
            self._flat.copy_(self._take(self._maker))
        elif not self._is_made:
            self._make()
        write_back(self._flat, self._tensor)

    def _make(self) -> None:
        parts = [self._flat if index == self._index else self._take(index) for index in range(len(self._ranks))]
        total = sum_in_order(parts, torch.empty_like(self._flat))
        for other in self._others:
            self._send(total, other)  # nobody changes it, so nobody need wait until it has left
        self._flat.copy_(total)
        self._is_made = True

    def _send(self, content: torch.Tensor, to: int) -> None:
        self._mail.send(content, self._ranks[to], self._ranks, self._tag)

    def _has_come(self, sender: int) -> bool:
        return self._mail.has(self._ranks[sender], self._ranks, self._tag)

    def _take(self, sender: int) -> torch.Tensor:
        return self._mail.take_as(self._ranks[sender], self._ranks, self._tag, self._flat)
