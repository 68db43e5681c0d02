"""What an optimizer keeps, taken apart into plain data and tensors: for those whose state nobody else understands.

Whatever an optimizer puts into its `state` is kept as it is, type and strides included: torch's own
`load_state_dict` would turn every tensor into the type of its parameter, and then the next step has other bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from shoal.errors import ProtocolError
from shoal.model.optimizer.kinds import changed_settings, settings_of
from shoal.model.replica import Replica

_ALIGN = 64
_BESIDE = 4096
"""Bytes for what is kept beside a state."""


def take_apart(optimizer: torch.optim.Optimizer) -> tuple[Any, list[torch.Tensor]]:
    """Its state as lists and plain values, in which tensors are named by their numbers; and these tensors."""
    numbers = {id(param): number for number, param in enumerate(_params(optimizer))}
    tensors: list[torch.Tensor] = []
    plain = [
        [["param", numbers[id(key)]] if isinstance(key, torch.Tensor) else ["key", key], _plain(kept, tensors)]
        for key, kept in optimizer.state.items()
        if not (isinstance(kept, dict) and not kept)  # `state` is a defaultdict: whoever looks leaves an entry
    ]
    return plain, tensors


def by_name(plain: Any, tensors: Sequence[torch.Tensor], replica: Replica) -> dict[str, torch.Tensor]:
    """`parameter/key -> tensor`: of a state that was taken apart, what are tensors of parameters."""
    names = {id(param): name for name, param in replica.trained.items()}
    of_number = [names.get(id(param), "") for param in _params(replica.optimizer)]
    return {
        f"{of_number[kept[0][1]]}/{key}": tensors[item[1]]
        for kept in plain
        if kept[0][0] == "param" and kept[1][0] == "dict"
        for key, item in kept[1][1]
        if item[0] == "tensor"
    }


def put_together(optimizer: torch.optim.Optimizer, plain: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Let an optimizer of the same parameters keep what was taken apart, in copies of the tensors."""
    params = _params(optimizer)
    optimizer.state.clear()
    for row in plain:
        match row:
            case [["param", int(number)], kept] if 0 <= number < len(params):
                optimizer.state[params[number]] = _unplain(kept, tensors)
            case [["key", key], kept]:
                optimizer.state[key] = _unplain(kept, tensors)
            case _:
                raise ProtocolError("What should be an optimizer's state is none.")


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return ["tensor", len(tensors) - 1]
    if isinstance(value, dict):
        return ["dict", [[key, _plain(item, tensors)] for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        return ["tuple" if type(value) is tuple else "list", [_plain(item, tensors) for item in value]]
    return ["value", value]


def _unplain(plain: Any, tensors: Sequence[Any]) -> Any:
    match plain:
        case ["tensor", int(number)] if 0 <= number < len(tensors) and isinstance(tensors[number], torch.Tensor):
            return tensors[number].clone(memory_format=torch.preserve_format)
        case ["dict", list(items)]:
            return {key: _unplain(item, tensors) for key, item in items}
        case ["list", list(items)]:
            return [_unplain(item, tensors) for item in items]
        case ["tuple", list(items)]:
            return tuple(_unplain(item, tensors) for item in items)
        case ["value", value]:
            return value
    raise ProtocolError("What should be an optimizer's state is none.")


class MovedSettings:
    """Of an optimizer's groups, the settings that its own steps change: they are state, too.

    All others are the user's and the scheduler's, and follow from the steps so far.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._first = [settings_of(group) for group in self._groups]
        self._moved: list[dict[str, Any]] = [{} for _ in self._groups]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The optimizer takes a step."""
        before = [settings_of(group) for group in self._groups]
        yield
        for moved, old, group in zip(self._moved, before, self._groups, strict=True):
            now = settings_of(group)
            keys = {
                key for key, value in changed_settings(old, now).items() if not isinstance(value, torch.Tensor)
            }
            moved.update({key: now[key] for key in keys | moved.keys()})

    def plain(self) -> Any:
        """Their values, as lists and plain values."""
        return _plain(self._moved, [])

    def adopt(self, plain: Any) -> None:
        """Let the groups have what `plain` gave elsewhere."""
        self._moved = _unplain(plain, ())
        for group, moved in zip(self._groups, self._moved, strict=True):
            group.update(moved)

    def forget(self) -> None:
        """Let the groups have what they began with."""
        for group, first, moved in zip(self._groups, self._first, self._moved, strict=True):
            for key in moved:
                del group[key]
            group.update({key: first[key] for key in moved if key in first})
        self._moved = [{} for _ in self._groups]

    def others(self) -> list[dict[str, Any]]:
        """By group: the settings that no step has changed, but the user and the scheduler."""
        pairs = zip(self._groups, self._moved, strict=True)
        return [{key: v for key, v in settings_of(group).items() if key not in moved} for group, moved in pairs]


@dataclass(frozen=True)
class StateImage:
    """An optimizer's state in memory that others can read: a length, a header of that length, the tensors."""

    memory: torch.Tensor
    """Bytes."""

    @staticmethod
    def nbytes_for(optimizer: torch.optim.Optimizer) -> int:
        """Room for its state, and for numbers in it that grow; 0 where it is not of plain values and tensors."""
        if (packed := _packed(optimizer, 0, None)) is None:
            return 0
        head, tensors = packed
        return _ALIGN + 2 * _aligned(len(head)) + _BESIDE + sum(_aligned(tensor.nbytes) for tensor in tensors)

    def write(self, optimizer: torch.optim.Optimizer, step: int, beside: Any = None) -> bool:
        """Leave its state after this step, and plain values beside it; whether that could be."""
        if (packed := _packed(optimizer, step, beside)) is None:
            return False
        head, tensors = packed
        at = _ALIGN + _aligned(len(head))
        if at + sum(_aligned(tensor.nbytes) for tensor in tensors) > self.memory.numel():
            return False
        self.memory[:8].view(torch.int64)[0] = len(head)
        self.memory[_ALIGN : _ALIGN + len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        for tensor in tensors:
            self._view(at, tensor.dtype, tensor.shape, _dense_stride(tensor)).copy_(tensor)
            at += _aligned(tensor.nbytes)
        return True

    def read(self, optimizer: torch.optim.Optimizer) -> tuple[int, Any]:
        """Let an optimizer of the same parameters keep what is here; the step after which it was left, and what is
        beside it."""
        step, beside, plain, tensors = self._opened()
        put_together(optimizer, plain, tensors)
        return step, beside

    def named(self, replica: Replica) -> dict[str, torch.Tensor]:
        """`parameter/key -> tensor`, where they lie: what is here of parameters of this replica."""
        _, _, plain, tensors = self._opened()
        return by_name(plain, tensors, replica)

    def beside(self) -> Any:
        """What is beside the state."""
        return self._opened()[1]

    def _opened(self) -> tuple[int, Any, Any, list[torch.Tensor]]:
        length = int(self.memory[:8].view(torch.int64)[0])
        head = self.memory[_ALIGN : _ALIGN + length].numpy().tobytes()
        step, beside, plain, looks = msgpack.unpackb(head)
        at, tensors = _ALIGN + _aligned(length), []
        for dtype, shape, stride in looks:
            tensors.append(self._view(at, getattr(torch, dtype), shape, stride))
            at += _aligned(tensors[-1].nbytes)
        return int(step), beside, plain, tensors

    def _view(self, at: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        count = torch.Size(shape).numel()
        flat = self.memory[at : at + count * dtype.itemsize].view(dtype)
        return flat.as_strided(shape, stride, flat.storage_offset())


def _packed(optimizer: torch.optim.Optimizer, step: int, beside: Any) -> tuple[bytes, list[torch.Tensor]] | None:
    """The header of an image and its tensors; None where the state holds what is neither plain nor a tensor."""
    try:
        plain, tensors = take_apart(optimizer)
        looks = [[str(t.dtype).removeprefix("torch."), list(t.shape), list(_dense_stride(t))] for t in tensors]
        return msgpack.packb([step, beside, plain, looks]), tensors
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its own strides where they fill its memory, as a copy of it has them."""
    return torch.empty_like(tensor, memory_format=torch.preserve_format, device="meta").stride()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
