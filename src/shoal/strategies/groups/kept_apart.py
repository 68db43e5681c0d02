"""Every worker's own state in a checkpoint, where the first one writes it for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from shoal.checkpoint.aside import put_aside
from shoal.checkpoint.model_stream import TensorLooks, TensorStream
from shoal.comm.group import Group
from shoal.strategies.groups.plain import share_plain

OF_ALL = "all"
"""In the place of a worker's number: what all have in common."""


@dataclass(frozen=True)
class KeptApart:
    """What workers put aside in a checkpoint, or have put there: `word/number/kind/name`, by a worker's number."""

    word: str
    """The first of each name: see `Conduct.puts_aside`."""
    tensors: Mapping[str, torch.Tensor]
    """To be put aside: without the word. From a checkpoint: with it."""

    def of(self, whose: int | str, kind: str) -> dict[str, torch.Tensor]:
        """From a checkpoint: this worker's tensors of a kind, by their own names."""
        prefix = f"{self.word}/{whose}/{kind}/"
        return {name.removeprefix(prefix): one for name, one in self.tensors.items() if name.startswith(prefix)}

    def stream(self, own: Mapping[str, torch.Tensor], group: Group) -> TensorStream:
        """The first worker's `own`, and what all have to put aside, one tensor after the other. All call this, and
        consume it."""
        mine = put_aside({f"{self.word}/{name}": one for name, one in self.tensors.items()})
        if group.is_first:
            mine |= own
        told = share_plain({name: [_name(one.dtype), list(one.shape)] for name, one in mine.items()}, group)
        owners = {name: index for index, names in enumerate(told) for name in names}
        looks = {
            name: TensorLooks(dtype=getattr(torch, told[index][name][0]), shape=tuple(told[index][name][1]))
            for name, index in owners.items()
        }
        return TensorStream(looks=looks, tensors=_brought(mine, owners, looks, group))


def _brought(
    mine: Mapping[str, torch.Tensor], owners: Mapping[str, int], looks: Mapping[str, TensorLooks], group: Group
) -> Iterator[tuple[str, torch.Tensor]]:
    for name in sorted(owners):
        owner = owners[name]
        if group.is_first:
            if owner == group.index:
                yield name, mine[name]
                continue
            room = looks[name].room()
            if room.numel():
                group.receive(room.view(-1), owner).wait()
            yield name, room
        elif owner == group.index and mine[name].numel():
            group.send(mine[name].detach().cpu().contiguous().view(-1), 0).wait()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
