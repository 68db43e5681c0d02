"""What travels from one worker to another: tensors and plain values, packed into one run of bytes.

What the bytes mean (kinds, dtypes, shapes) is a message's form, which is told before it, or known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shoal.arena.tensors import as_bytes
from shoal.errors import TaskError

_ALIGN_BYTES = 64
"""Tensors begin where memory of their own would: how kernels group their sums may depend on that."""
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
    """How a value is laid out in a message."""

    items: tuple[Item, ...]
    layout: Any
    """The value as plain data, in which `["item"]` stands for each item, in order."""

    @classmethod
    def of(cls, value: Any) -> Form:
        """The form of a value; TaskError where something in it cannot travel."""
        found: list[Any] = []
        layout = _take_apart(value, found)
        return cls(tuple(map(_describe, found)), layout)

    @property
    def differentiable(self) -> Form:
        """The form of the gradients that come back."""
        items = tuple(item for item in self.items if item.differentiable)
        return Form(items, ["list", [["item"] for _ in items]])

    def to_bytes(self) -> torch.Tensor:
        """To be told to whoever receives the message."""
        return torch.frombuffer(bytearray(json.dumps(asdict(self)).encode()), dtype=torch.uint8)

    @classmethod
    def from_bytes(cls, told: torch.Tensor) -> Form:
        """What the sender has told."""
        plain = json.loads(told.numpy().tobytes())
        items = tuple(Item(**{**item, "shape": tuple(item["shape"])}) for item in plain["items"])
        return cls(items, plain["layout"])


def leaves(value: Any) -> list[Any]:
    """The tensors and numbers of a value, in order: what a message has as items."""
    found: list[Any] = []
    _take_apart(value, found)
    return found


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a value, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _take_apart(value: Any, items: list[Any]) -> Any:
    match value:
        case torch.Tensor() | bool() | int() | float():
            items.append(value)
            return ["item"]
        case tuple() | list():
            kind = "list" if isinstance(value, list) else "tuple"
            return [kind, [_take_apart(one, items) for one in value]]
        case dict():
            return ["dict", [[key, _take_apart(one, items)] for key, one in value.items()]]
        case None | str():
            return ["plain", value]
    raise TaskError(
        f"Task: a layer passes a {type(value).__name__} on to a layer of another worker, but only tensors and "
        "plain numbers, and tuples, lists and dicts of them, can go there; keep both on one worker, pass such "
        "values as arguments, or use sharded or data."
    )


def _put_together(layout: Any, items: Iterator[Any]) -> Any:
    """The value that `_take_apart` took apart."""
    match layout:
        case ["item"]:
            return next(items)
        case ["tuple", parts]:
            return tuple(_put_together(part, items) for part in parts)
        case ["list", parts]:
            return [_put_together(part, items) for part in parts]
        case ["dict", parts]:
            return {key: _put_together(part, items) for key, part in parts}
        case ["plain", value]:
            return value
    raise AssertionError(f"no value is laid out as {layout!r}")


def _describe(leaf: Any) -> Item:
    if isinstance(leaf, torch.Tensor):
        dtype = str(leaf.dtype).removeprefix("torch.")
        return Item("tensor", dtype, tuple(leaf.shape), leaf.requires_grad)
    kind = next(name for name, number in _NUMBERS.items() if isinstance(leaf, number))
    return Item(kind, "float64" if kind == "float" else "int64", ())


def pack(form: Form, items: Sequence[Any], *, copies: bool = False) -> torch.Tensor:
    """The bytes of a message; those of a single tensor in the host's memory are its own, unless it `copies`.

    A tensor that is not there (None), such as a gradient that nobody found, is one of zeros.
    """
    tensors = [_as_tensor(leaf, item) for leaf, item in zip(items, form.items, strict=True)]
    if len(tensors) == 1 and not copies:
        return as_bytes(tensors[0])
    packed = torch.empty(_num_bytes(form), dtype=torch.uint8)
    for tensor, start in zip(tensors, _starts(form), strict=True):
        packed[start : start + tensor.nbytes].copy_(as_bytes(tensor))
    return packed


def _as_tensor(leaf: Any, item: Item) -> torch.Tensor:
    if leaf is None:
        return item.empty().zero_()
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

    def value(self, device: str) -> Any:
        """What has come; differentiable tensors are leaves that gather gradients."""
        found: list[Any] = []
        for item, tensor in zip(self._form.items, self._tensors, strict=True):
            if item.kind == "tensor":
                found.append(tensor.to(device).requires_grad_(item.differentiable and torch.is_grad_enabled()))
            else:
                found.append(_NUMBERS[item.kind](tensor.item()))
        return _put_together(self._form.layout, iter(found))


def arrived(value: Any, device: str = "cpu") -> Any:
    """A value as another worker would find it."""
    form = Form.of(value)
    message = MessageRoom(form)
    message.room.copy_(pack(form, leaves(value)))
    return message.value(device)


def _starts(form: Form) -> list[int]:
    starts, end = [], 0
    for item in form.items:
        starts.append(end)
        end += -(-item.num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return starts


def _num_bytes(form: Form) -> int:
    return _starts(form)[-1] + form.items[-1].num_bytes if form.items else 0
