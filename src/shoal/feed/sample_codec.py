"""Samples as messages: their shape as plain data, their tensors as frames; nothing is pickled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from shoal.comm.codec import Frame
from shoal.errors import ProtocolError, TaskError

_PLAIN = (type(None), bool, int, float, str, bytes)


def pack(value: Any, frames: list[Frame], what: str = "Shipped: a sample") -> list[Any]:
    """A sample as plain data; its tensors are appended to `frames`. `what` names it where it cannot be sent."""
    if isinstance(value, torch.Tensor):
        frames.append(value)
        return ["tensor", len(frames) - 1]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        frames.append(torch.from_numpy(np.array(value)))
        return ["array" if isinstance(value, np.ndarray) else "scalar", len(frames) - 1]
    if type(value) in _PLAIN:
        return ["plain", value]
    if type(value) in (tuple, list):
        return [type(value).__name__, [pack(item, frames, what) for item in value]]
    if isinstance(value, Mapping):  # those of Hugging Face arrive as dicts
        return ["dict", [[pack(key, frames, what), pack(item, frames, what)] for key, item in value.items()]]
    raise TaskError(
        f"{what} holds a {type(value).__name__}, which cannot be sent; use tensors, numpy arrays, "
        "numbers and texts, in tuples, lists and dicts."
    )


def unpack(plain: Any, frames: list[Any]) -> Any:
    """The sample that `pack` wrote; `ProtocolError` for anything else."""
    match plain:
        case ["tensor" | "array" | "scalar" as kind, int(number)] if 0 <= number < len(frames):
            tensor = frames[number]
            if isinstance(tensor, torch.Tensor):
                return tensor if kind == "tensor" else tensor.numpy() if kind == "array" else tensor.numpy()[()]
        case ["plain", value] if type(value) in _PLAIN:
            return value
        case ["tuple", list(items)]:
            return tuple(unpack(item, frames) for item in items)
        case ["list", list(items)]:
            return [unpack(item, frames) for item in items]
        case ["dict", list(items)] if all(isinstance(item, list) and len(item) == 2 for item in items):
            return {unpack(key, frames): unpack(item, frames) for key, item in items}
    raise ProtocolError("What should be a sample is none.")
