"""Sums over all workers, some of whom may be lost in the middle of one.

All come to the same sums in the same order, and each needs everybody's part: so nobody is ahead of another by more
than one. Where some were lost, whoever has the last sum gives it to those who lack it, with what the lost ones had
brought; one that nobody has is made again by those who are left. So a sum counts once, and the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.comm.group import Group
from shoal.strategies.base import Company
from shoal.strategies.groups.orders import awaiting_orders
from shoal.strategies.groups.plain import receive_plain, send_plain


class CommonSums:
    """One worker's part in them."""

    def __init__(self, group: Group, company: Company) -> None:
        self._group, self._company = group, company
        self._count = 0
        self._step = -1
        self._kept: dict[str, list[torch.Tensor]] = {}
        """By name: what all came to after this step, and after no other."""

    def kept(self, step: int, name: str) -> list[torch.Tensor] | None:
        """What all came to under this name; nobody changes it."""
        return self._kept.get(name) if step == self._step else None

    def sum(self, step: int, name: str, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of what all bring, which this may write into, in the order of their ranks. All call this after the same
        step; where it was left in the middle, it is called again with the same name."""
        if (found := self.kept(step, name)) is None:
            with awaiting_orders(self._company):
                found = [self._group.all_reduce_(tensor) for tensor in own]
            self._keep(step, name, found)
        return found

    def go_on_in(self, group: Group) -> None:
        """Come together with those who are left: have what any of them has."""
        self._group = group
        with awaiting_orders(self._company):
            counts = [int(count) for count in group.all_gather(torch.tensor([self._count]))]
            last = max(counts)
            giver = counts.index(last)
            behind = [index for index, count in enumerate(counts) if count < last]
            if group.index == giver:
                for index in behind:
                    self._give(index)
            elif group.index in behind:
                self._take(giver)
            if behind:
                group.barrier()  # nobody turns to something else while another waits for its answer

    def _give(self, to: int) -> None:
        name = list(self._kept)[-1]
        tensors = self._kept[name]
        looks = [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in tensors]
        send_plain([self._step, name, looks], to, self._group)
        for one in tensors:
            if one.numel():
                self._group.send(one.contiguous().view(-1), to).wait()

    def _take(self, sender: int) -> None:
        step, name, looks = receive_plain(sender, self._group)
        found = []
        for kind, shape in looks:
            found.append(torch.empty(shape, dtype=getattr(torch, kind)))
            if found[-1].numel():
                self._group.receive(found[-1].view(-1), sender).wait()
        self._keep(step, name, found)

    def _keep(self, step: int, name: str, found: list[torch.Tensor]) -> None:
        if step != self._step:
            self._step, self._kept = step, {}
        self._kept[name] = found
        self._count += 1
