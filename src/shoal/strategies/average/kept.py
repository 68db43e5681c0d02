"""Every worker's own state in a checkpoint: what its optimizer keeps, and its parameters where they are apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from shoal.checkpoint.aside import put_aside
from shoal.checkpoint.model_stream import TensorLooks, TensorStream
from shoal.comm.group import Group
from shoal.model.replica import Replica
from shoal.strategies.groups.plain import share_plain

_WORD = "replica"
"""The first of each name: see `Conduct.puts_aside`."""
OF_ALL = "all"
"""In the place of a worker's number: what all have in common."""


def stream_of_all(
    own: Mapping[str, torch.Tensor], aside: Mapping[str, torch.Tensor], group: Group
) -> TensorStream:
    """The first worker's `own`, and what all have to put aside, one tensor after the other. All call this, and
    consume it."""
    mine = {
        **(own if group.is_first else {}),
        **put_aside({f"{_WORD}/{name}": one for name, one in aside.items()}),
    }
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


def kept_by(aside: Mapping[str, torch.Tensor], whose: int | str, what: str) -> dict[str, torch.Tensor]:
    """Of what was put aside: this worker's tensors of a kind, by their own names."""
    prefix = f"{_WORD}/{whose}/{what}/"
    return {name.removeprefix(prefix): one for name, one in aside.items() if name.startswith(prefix)}


def take_up_state(replica: Replica, worker: int) -> None:
    """Let the replica begin with the optimizer's state of this worker in the checkpoint: the first one's is where
    any strategy finds it."""
    if worker:
        state = kept_by(replica.start.aside, worker, "state")
        replica.start = replace(replica.start, optimizer=state)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
