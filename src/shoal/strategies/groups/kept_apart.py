"""Every worker's own state in a checkpoint, where the first one writes it for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
        return brought_to_first({name: TensorLooks.of(one) for name, one in mine.items()}, mine.get, group)


def brought_to_first(
    own: Mapping[str, TensorLooks], give: Callable[[str], torch.Tensor | None], group: Group
) -> TensorStream:
    """At the first worker, one tensor after the other: all that any have to give. All call this, and consume it.

    `own`: what this worker has to give in the end; `give`: the tensor, asked by all workers for all tensors, so
    that several may make one together."""
    told = share_plain({name: [_name(look.dtype), list(look.shape)] for name, look in own.items()}, group)
    owners = {name: index for index, names in enumerate(told) for name in names}
    looks = {
        name: TensorLooks(dtype=getattr(torch, told[index][name][0]), shape=tuple(told[index][name][1]))
        for name, index in owners.items()
    }
    return TensorStream(looks=looks, tensors=_brought(give, owners, looks, group))


def _brought(
    give: Callable[[str], torch.Tensor | None],
    owners: Mapping[str, int],
    looks: Mapping[str, TensorLooks],
    group: Group,
) -> Iterator[tuple[str, torch.Tensor]]:
    for name in sorted(owners):
        owner, given = owners[name], give(name)
        if group.is_first:
            if owner == group.index:
                assert given is not None
                yield name, given
                continue
            room = looks[name].room()
            if room.numel():
                group.receive(room.view(-1), owner).wait()
            yield name, room
        elif owner == group.index and given is not None and given.numel():
            group.send(given.detach().cpu().contiguous().view(-1), 0).wait()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
