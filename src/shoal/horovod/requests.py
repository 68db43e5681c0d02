"""What a process wants done together with the others, as plain data, and whether all want the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Act(StrEnum):
    """What processes do together."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCESCATTER = "reducescatter"
    BARRIER = "barrier"
    ADD_SET = "add_process_set"
    REMOVE_SET = "remove_process_set"


@dataclass(frozen=True, kw_only=True)
class TensorLook:
    """What a tensor is like."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True)
class TensorRequest:
    """One process's wish: an operation on one tensor, or on several that go together."""

    name: str
    act: Act
    tensors: tuple[TensorLook, ...] = ()
    device: str = "cpu"
    op: str = ""
    root: int = 0
    """A rank of the job."""
    splits: tuple[int, ...] = ()
    """Of the first dimension, one for each process."""
    prescale: float = 1.0
    postscale: float = 1.0
    ranks: tuple[int, ...] = ()
    """Of a process set that is to be."""

    def to_plain(self) -> list[Any]:
        """As JSON takes it."""
        looks = [[one.dtype, list(one.shape)] for one in self.tensors]
        scales = [self.prescale, self.postscale]
        return [self.name, self.act, looks, self.device, self.op, self.root, self.splits, *scales, self.ranks]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> TensorRequest:
        """What `to_plain` gave."""
        name, act, looks, device, op, root, splits, prescale, postscale, ranks = plain
        return cls(
            name=name,
            act=Act(act),
            tensors=tuple(TensorLook(dtype=dtype, shape=tuple(shape)) for dtype, shape in looks),
            device=device,
            op=op,
            root=root,
            splits=tuple(splits),
            prescale=prescale,
            postscale=postscale,
            ranks=tuple(ranks),
        )


def disagreement(wanted: Mapping[int, TensorRequest]) -> str | None:
    """Why what ranks want under one name cannot be done; None where it can. All come to the same sentence."""
    first_rank, first = next(iter(wanted.items()))
    for rank, other in wanted.items():
        problem = _difference(first, other)
        if problem is not None:
            what, ours, theirs = problem
            return (
                f"Mismatched {what}: rank {first_rank} has {ours}, but rank {rank} has {theirs} "
                f"(tensor name {first.name!r}); let all ranks ask for the same."
            )
    return None


def _difference(ours: TensorRequest, theirs: TensorRequest) -> tuple[str, object, object] | None:
    """What differs, in the order in which people should mend it."""
    pairs = [
        ("operations", ours.act, theirs.act),
        ("CPU/GPU device selection", ours.device, theirs.device),
        ("numbers of tensors", len(ours.tensors), len(theirs.tensors)),
        ("data types", _types(ours), _types(theirs)),
        ("reduction operations", ours.op, theirs.op),
        ("prescale factors", ours.prescale, theirs.prescale),
        ("postscale factors", ours.postscale, theirs.postscale),
        (f"{ours.act} root ranks", ours.root, theirs.root),
        ("process sets", ours.ranks, theirs.ranks),
    ]
    found = next((pair for pair in pairs if pair[1] != pair[2]), None)
    if found is not None:
        return found
    for one, other in zip(ours.tensors, theirs.tensors, strict=True):
        if _must_equal(ours.act, one) != _must_equal(theirs.act, other):
            return f"{ours.act} tensor shapes", f"a tensor of shape {one}", f"one of shape {other}"
    return None


def _types(request: TensorRequest) -> str:
    return ", ".join(one.dtype for one in request.tensors)


def _must_equal(act: Act, look: TensorLook) -> tuple[int, ...]:
    """The part of a shape that all have in common: rows may differ where they are put behind each other."""
    if act in (Act.ALLGATHER, Act.ALLTOALL):
        return (len(look.shape), *look.shape[1:])
    return look.shape
