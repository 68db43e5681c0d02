"""Agreeing with neighbours alone: who they are, as pure functions, and what a worker does with what they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shoal.comm.group import Group
from shoal.strategies.groups.vectors import Vectors


def neighbours(form: str, index: int, size: int, number: int) -> list[int]:
    """With whom this worker agrees in the agreement of this number, counted from 0. Whoever is named names back,
    so that the mean over all workers stays what it is."""
    if form == "ring":
        return sorted({(index - 1) % size, (index + 1) % size} - {index})
    partner = _partner(index, size, number)
    return [] if partner is None else [partner]


def _partner(index: int, size: int, number: int) -> int | None:
    """As in a tournament in which each meets each: the last one stays where it is, the others go round. Where they
    are an odd number, the last is nobody, and whoever would meet it rests."""
    last = size - 1 + size % 2
    if last < 1:
        return None
    around = number % last
    if index == last:
        return around
    met = (2 * around - index) % last
    partner = last if met == index else met
    return partner if partner < size else None


@torch.no_grad()
def agree_with(group: Group, peers: Sequence[int], own: Vectors) -> Vectors:
    """The mean of one's own values and those that the peers have."""
    found: dict[int, Vectors] = {peer: {} for peer in peers}
    for kind, vector in own.items():
        content = vector.detach().to("cpu", copy=True)
        for peer in peers:
            group.send(content, peer)  # nobody changes it, so nobody need wait until it has left
        for peer in peers:
            found[peer][kind] = torch.empty_like(content)
            group.receive(found[peer][kind], peer).wait()
    return mean_with(found, own)


@torch.no_grad()
def mean_with(others: Mapping[int, Mapping[torch.dtype, torch.Tensor]], own: Vectors) -> Vectors:
    """The mean of one's own values and these others', in the order of their numbers."""
    mean = Vectors()
    for kind, vector in own.items():
        # Differences, so that what nobody changed stays what it is, to the bit.
        change = torch.zeros_like(vector)
        for peer in sorted(others):
            change.add_(others[peer][kind].to(vector.device) - vector, alpha=1 / (1 + len(others)))
        mean[kind] = vector + change
    return mean
