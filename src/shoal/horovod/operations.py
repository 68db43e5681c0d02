"""What was agreed on, done in a group. Everybody does the same, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from shoal.arena.tensors import as_bytes
from shoal.comm.group import Group
from shoal.comm.group.base import flat_in_host, write_back
from shoal.horovod.negotiation import Decision
from shoal.horovod.reductions import ReduceOp, adasum, check_reducible, make_reduction
from shoal.horovod.requests import Act, TensorLook, TensorRequest

FUSED_BYTES = 256 << 10
"""Tensors up to here go together with others: one wait takes longer than to copy them."""


@dataclass(eq=False, kw_only=True)
class Submission:
    """What this process asked for: its request, and the tensors that it is about."""

    request: TensorRequest
    tensors: list[Tensor] = field(default_factory=list)
    """In: what it brings. Of reductions and broadcasts in place, also what it gets."""


@dataclass(frozen=True, kw_only=True)
class RowsOfAll:
    """Rows of all, behind each other."""

    tensor: Tensor
    rows: tuple[int, ...]
    """How many are of whom."""


def look_of(tensor: Tensor) -> TensorLook:
    """What a request says of a tensor."""
    return TensorLook(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def refusal(decision: Decision, group: Group) -> str:
    """Why something that all want cannot be done; empty where it can."""
    request = decision.request
    if decision.error:
        return decision.error
    if request.act in (Act.ALLREDUCE, Act.REDUCESCATTER):
        op = ReduceOp(request.op)
        return next((text for one in request.tensors if (text := check_reducible(op, _dtype(one)))), "")
    if request.act is Act.BROADCAST and request.root not in group.ranks:
        return f"The root rank {request.root} is not among the ranks {list(group.ranks)} that take part."
    if len(decision.wanted) < group.size and request.act is not Act.ALLGATHER:
        return f"A rank has joined, and {request.act} takes all ranks; call join() after the last one."
    return ""


def do(decision: Decision, mine: Submission | None, group: Group) -> list[Tensor] | list[RowsOfAll]:
    """One that is not an allreduce, with what this process has asked for; None where it has joined."""
    request = decision.request
    match request.act:
        case Act.BROADCAST:
            assert mine is not None
            return [_broadcast(tensor, group.ranks.index(request.root), group) for tensor in mine.tensors]
        case Act.ALLGATHER:
            given = mine.tensors if mine is not None else [_zeros(one, rows=0) for one in request.tensors]
            return [_allgather(one, number, decision, group) for number, one in enumerate(given)]
        case Act.ALLTOALL:
            assert mine is not None
            return [_alltoall(tensor, decision, group) for tensor in mine.tensors]
        case Act.REDUCESCATTER:
            assert mine is not None
            return [_reducescatter(tensor, request, group) for tensor in mine.tensors]
    assert request.act is Act.BARRIER
    return []  # that all have asked for it is all there is


def allreduce_all(pairs: Sequence[tuple[TensorRequest, Submission | None]], group: Group) -> None:
    """Several allreduces: small tensors of a kind go in one piece."""
    waiting: dict[tuple[str, torch.dtype, float, float], list[Tensor]] = {}
    for request, mine in pairs:
        tensors = mine.tensors if mine is not None else [_zeros(one) for one in request.tensors]
        for tensor in tensors:
            kind = (request.op, tensor.dtype, request.prescale, request.postscale)
            if request.op == ReduceOp.ADASUM or tensor.nbytes > FUSED_BYTES:
                _allreduce(tensor, *kind, group)
            else:
                waiting.setdefault(kind, []).append(tensor)
    for kind, tensors in waiting.items():
        if len(tensors) == 1:
            _allreduce(tensors[0], *kind, group)
            continue
        fused = torch.cat([flat_in_host(tensor) for tensor in tensors])
        _allreduce(fused, *kind, group)
        for tensor, result in zip(tensors, fused.split([one.numel() for one in tensors]), strict=True):
            tensor.detach().copy_(result.view(tensor.shape))


def _allreduce(
    tensor: Tensor, op: str, dtype: torch.dtype, prescale: float, postscale: float, group: Group
) -> None:
    kind = ReduceOp(op)
    if kind is not ReduceOp.ADASUM:
        group.reduce_(tensor, make_reduction(kind, group.size, dtype, prescale, postscale))
        return
    flat = flat_in_host(tensor)
    rows = group.all_gather(as_bytes(flat * prescale if prescale != 1 else flat))
    flat.copy_(adasum([row.view(dtype) for row in rows]) * postscale)
    write_back(flat, tensor)


def _broadcast(tensor: Tensor, root: int, group: Group) -> Tensor:
    flat = flat_in_host(tensor)
    group.broadcast_(as_bytes(flat), root)
    return write_back(flat, tensor)


def _allgather(tensor: Tensor, number: int, decision: Decision, group: Group) -> RowsOfAll:
    # Who has joined brings no rows.
    rows = tuple(
        decision.wanted[index].tensors[number].shape[0] if index in decision.wanted else 0
        for index in range(group.size)
    )
    found = torch.empty((sum(rows), *tensor.shape[1:]), dtype=tensor.dtype)
    slices = [as_bytes(part) for part in found.split(rows)]
    slices[group.index].copy_(as_bytes(flat_in_host(tensor)))
    group.all_gather_(slices)
    return RowsOfAll(tensor=found.to(tensor.device), rows=rows)


def _alltoall(tensor: Tensor, decision: Decision, group: Group) -> RowsOfAll:
    splits = [_splits(decision.wanted[index], group.size) for index in range(group.size)]
    rows = tuple(split[group.index] for split in splits)
    found = torch.empty((sum(rows), *tensor.shape[1:]), dtype=tensor.dtype)
    # Everybody sees all rows and takes its own. Letters would carry less, but process sets have threads of their
    # own, and those of one process share the letters' desk.
    whole = [torch.empty((sum(split), *tensor.shape[1:]), dtype=tensor.dtype) for split in splits]
    whole[group.index] = tensor.detach().cpu().contiguous()
    group.all_gather_([as_bytes(one) for one in whole])
    for theirs, split, room in zip(whole, splits, found.split(rows), strict=True):
        room.copy_(theirs.split(split)[group.index])
    return RowsOfAll(tensor=found.to(tensor.device), rows=rows)


def _splits(request: TensorRequest, size: int) -> tuple[int, ...]:
    """How many rows this process sends to whom; alike where it did not say."""
    return request.splits or (request.tensors[0].shape[0] // size,) * size


def scattered_rows(rows: int, size: int) -> list[int]:
    """How many rows of a reduced tensor each gets: the first ones one more."""
    return [rows // size + (index < rows % size) for index in range(size)]


def _reducescatter(tensor: Tensor, request: TensorRequest, group: Group) -> Tensor:
    whole = tensor.detach().clone()
    _allreduce(whole, request.op, whole.dtype, request.prescale, request.postscale, group)
    shares = scattered_rows(len(whole), group.size)
    start = list(accumulate(shares, initial=0))[group.index]
    return whole[start : start + shares[group.index]].clone()


def _dtype(look: TensorLook) -> torch.dtype:
    found = getattr(torch, look.dtype)
    assert isinstance(found, torch.dtype)
    return found


def _zeros(look: TensorLook, rows: int | None = None) -> Tensor:
    """What a rank that has joined brings."""
    shape = look.shape if rows is None else (rows, *look.shape[1:])
    return torch.zeros(shape, dtype=_dtype(look))
