"""What travels from one stage to the next: tensors and numbers, packed into one run of bytes.

Its form (kinds, dtypes, shapes) follows from the shape of what the model is given, so it is told once for each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shoal.comm.group import as_bytes
from shoal.errors import TaskError

_ALIGN_BYTES = 16
_NUMBERS: dict[str, type] = {"bool": bool, "int": int, "float": float}


@dataclass(frozen=True)
class Item:
    """One tensor, or one number."""

    kind: str
    """`tensor`, or the type of a number."""
    dtype: str
    shape: tuple[int, ...]
    differentiable: bool = False
    """Whether a gradient comes back for it."""

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize

    def empty(self) -> torch.Tensor:
        """Room for its values, in the host's memory."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype))


@dataclass(frozen=True)
class Form:
    """How values are laid out in a message."""

    items: tuple[Item, ...]
    lengths: tuple[int, ...]
    """By value: how many items it has as a tuple; -1: it is a single one."""

    @classmethod
    def of(cls, values: Sequence[Any]) -> Form:
        """The form of these values; TaskError where one of them cannot travel."""
        lengths = tuple(len(value) if isinstance(value, tuple) else -1 for value in values)
        return cls(tuple(_describe(leaf) for leaf in leaves(values)), lengths)

    @property
    def differentiable(self) -> Form:
        """The form of the gradients that come back."""
        items = tuple(item for item in self.items if item.differentiable)
        return Form(items, (-1,) * len(items))

    def to_bytes(self) -> torch.Tensor:
        """To be told to the next stage."""
        return torch.frombuffer(bytearray(json.dumps(asdict(self)).encode()), dtype=torch.uint8)

    @classmethod
    def from_bytes(cls, told: torch.Tensor) -> Form:
        """What the stage before has told."""
        plain = json.loads(bytes(told.tolist()))
        items = tuple(Item(**{**item, "shape": tuple(item["shape"])}) for item in plain["items"])
        return cls(items, tuple(plain["lengths"]))

    def arrange(self, found: Sequence[Any]) -> list[Any]:
        """Values from their items."""
        rest = iter(found)
        return [next(rest) if length < 0 else tuple(next(rest) for _ in range(length)) for length in self.lengths]


def leaves(values: Sequence[Any]) -> Iterator[Any]:
    """The items of values, each a single one or a tuple."""
    for value in values:
        if isinstance(value, tuple):
            yield from value
        else:
            yield value


def can_travel(value: Any) -> bool:
    """Whether a value is a tensor, a number, or a tuple of these."""
    return all(isinstance(leaf, (torch.Tensor, bool, int, float)) for leaf in leaves([value]))


def _describe(leaf: Any) -> Item:
    if isinstance(leaf, torch.Tensor):
        dtype = str(leaf.dtype).removeprefix("torch.")
        return Item("tensor", dtype, tuple(leaf.shape), leaf.requires_grad)
    if not can_travel(leaf):
        raise TaskError(
            f"Task: a {type(leaf).__name__} would have to travel between stages of the pipeline, which takes "
            "tensors, numbers and tuples of them; pass such values as arguments, or use sharded or data."
        )
    return Item(type(leaf).__name__, "float64" if isinstance(leaf, float) else "int64", ())


def pack(form: Form, values: Sequence[Any]) -> torch.Tensor:
    """The bytes of a message; of a single tensor in the host's memory, its own."""
    tensors = [_as_tensor(leaf, item) for leaf, item in zip(leaves(values), form.items, strict=True)]
    if len(tensors) == 1:
        return as_bytes(tensors[0])
    packed = torch.empty(_num_bytes(form), dtype=torch.uint8)
    for tensor, start in zip(tensors, _starts(form), strict=True):
        packed[start : start + tensor.nbytes].copy_(as_bytes(tensor))
    return packed


def _as_tensor(leaf: Any, item: Item) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().cpu().contiguous()
    return torch.tensor(leaf, dtype=getattr(torch, item.dtype))


class MessageRoom:
    """Room for a message, and what is in it once it has come."""

    def __init__(self, form: Form) -> None:
        self._form = form
        if len(form.items) == 1:
            self._tensors = [form.items[0].empty()]
            self.room = as_bytes(self._tensors[0])
        else:
            self.room = torch.empty(_num_bytes(form), dtype=torch.uint8)
            self._tensors = [
                # `.data`: no view to autograd, which would not let a view of bytes be a leaf of its own.
                self.room[start : start + item.num_bytes].view(getattr(torch, item.dtype)).view(item.shape).data
                for item, start in zip(form.items, _starts(form), strict=True)
            ]

    def values(self, device: str) -> list[Any]:
        """What has come; differentiable tensors are leaves that gather gradients."""
        found: list[Any] = []
        for item, tensor in zip(self._form.items, self._tensors, strict=True):
            if item.kind == "tensor":
                found.append(tensor.to(device).requires_grad_(item.differentiable and torch.is_grad_enabled()))
            else:
                found.append(_NUMBERS[item.kind](tensor.item()))
        return self._form.arrange(found)


def _starts(form: Form) -> list[int]:
    starts, end = [], 0
    for item in form.items:
        starts.append(end)
        end += -(-item.num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return starts


def _num_bytes(form: Form) -> int:
    return _starts(form)[-1] + form.items[-1].num_bytes if form.items else 0
