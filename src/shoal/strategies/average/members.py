"""Replicas that begin apart, and those that stay so: the members of an ensemble, used and saved as one model."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from shoal.checkpoint.model_stream import TensorStream
from shoal.comm.group import Group
from shoal.errors import CheckpointError
from shoal.ledger.order import mix
from shoal.model.ensemble import InTurn, member_name
from shoal.model.replica import Replica
from shoal.strategies.average.values import AgreedValues
from shoal.strategies.groups.vectors import Vectors

_BEGINNING = 1 << 33
"""In the place of a step: keys what a worker's own initialisation draws."""


class EnsembleMember(NamedTuple):
    """What moves in one worker's model."""

    values: Vectors
    numbers: list[torch.Tensor]
    """Counts."""


def begin_apart(replica: Replica, index: int, size: int, *, is_own: bool) -> None:
    """Give this worker's replica what it begins with, where that is not what all begin with: a saved member, or
    an initialisation of its own. The first worker's is the task's."""
    if members := replica.start.members:
        if len(members) != size:
            raise CheckpointError(
                f"The saved model is an ensemble of {len(members)}, and there are {size} workers; an ensemble has "
                f"as many members as workers: use --workers {len(members)}."
            )
        with torch.no_grad():
            replica.module.load_state_dict(dict(members[index]))
    elif is_own and index and replica.start.model is None:
        AgreedValues(replica).begin_with(replica.made_anew(mix(replica.task.seed, _BEGINNING, index)))


def gathered(values: AgreedValues, group: Group) -> list[EnsembleMember]:
    """By worker: what it has. All call this."""
    own = values.read()
    found: list[Vectors] = [{} for _ in group.ranks]
    for kind, vector in own.items():
        for index, each in enumerate(group.all_gather(vector)):
            found[index][kind] = each
    numbers: list[list[torch.Tensor]] = [[] for _ in group.ranks]
    for number in values.whole_numbers():
        for index, each in enumerate(group.all_gather(number.reshape(-1))):
            numbers[index].append(each.clone().view(number.shape))
    return [EnsembleMember(*pair) for pair in zip(found, numbers, strict=True)]


def mean_of(members: Sequence[Vectors]) -> Vectors:
    """The mean of what several have, added up in their order."""
    mean = {kind: vector / len(members) for kind, vector in members[0].items()}
    for each in members[1:]:
        for kind, vector in mean.items():
            vector.add_(each[kind] / len(members))
    return mean


@torch.no_grad()
def _take_on(values: AgreedValues, member: EnsembleMember) -> None:
    values.write(member.values)
    for own, number in zip(values.whole_numbers(), member.numbers, strict=True):
        own.copy_(number)


@contextmanager
def _afterwards_own(values: AgreedValues) -> Iterator[None]:
    """After this block the replica has the values again that it has now."""
    own = EnsembleMember(values.read(), [number.clone() for number in values.whole_numbers()])
    try:
        yield
    finally:
        _take_on(values, own)


@contextmanager
def ensemble_in_use(replica: Replica, values: AgreedValues, members: Sequence[EnsembleMember]) -> Iterator[None]:
    """In this block the replica's module is the ensemble."""
    module = replica.module
    with _afterwards_own(values):
        replica.module = InTurn(module, [partial(_take_on, values, member) for member in members])
        replica.module.train(module.training)
        try:
            yield
        finally:
            replica.module = module


def ensemble_stream(replica: Replica, values: AgreedValues, members: Sequence[EnsembleMember]) -> TensorStream:
    """The states of all members, as those of one model."""
    found = dict[str, torch.Tensor]()
    with _afterwards_own(values):
        for index, member in enumerate(members):
            _take_on(values, member)
            # A copy in which tied weights stay tied.
            state = copy.deepcopy(dict(replica.module.state_dict()))
            found |= {member_name(index, name): tensor for name, tensor in state.items()}
    return TensorStream.of(found)
