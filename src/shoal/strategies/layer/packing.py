"""What layers pass on to one another, as plain data and tensors, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shoal.errors import SpecError


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors of a value, in order."""
    found: list[torch.Tensor] = []
    replace_tensors(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def replace_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same value with other things in the places of its tensors."""
    match value:
        case torch.Tensor():
            return change(value)
        case tuple() | list():
            return type(value)(replace_tensors(item, change) for item in value)
        case dict():
            return {key: replace_tensors(item, change) for key, item in value.items()}
    return value


def pack(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """A value as plain data that names its tensors by number, and the tensors."""
    tensors: list[torch.Tensor] = []
    return _plain(value, tensors), tensors


def _plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    match value:
        case torch.Tensor():
            tensors.append(value)
            return ["tensor", len(tensors) - 1]
        case torch.Size() | tuple() | list():
            kind = "list" if isinstance(value, list) else "tuple"
            return [kind, [_plain(item, tensors) for item in value]]
        case dict():
            return ["dict", [[key, _plain(item, tensors)] for key, item in value.items()]]
        case None | bool() | int() | float() | str():
            return ["plain", value]
    raise SpecError(
        f"layer: a layer passes a {type(value).__name__} on to a layer of another worker, but only tensors and "
        "plain numbers, and tuples, lists and dicts of them, can go there; place both on one worker."
    )


def unpack(plain: Any, tensors: list[torch.Tensor]) -> Any:
    """The value that `pack` took apart."""
    match plain:
        case ["tensor", int(number)]:
            return tensors[number]
        case ["tuple", items]:
            return tuple(unpack(item, tensors) for item in items)
        case ["list", items]:
            return [unpack(item, tensors) for item in items]
        case ["dict", items]:
            return {key: unpack(item, tensors) for key, item in items}
        case ["plain", value]:
            return value
    raise AssertionError(f"pack makes no {plain!r}")
