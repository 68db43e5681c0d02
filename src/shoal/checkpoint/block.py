"""Tensors side by side in one piece of memory, laid out as they lie in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.checkpoint.manifest import ALIGNMENT, ITEM_BYTES, PAGE_BYTES, Location
from shoal.errors import CheckpointError


@dataclass(frozen=True)
class Block:
    """Bytes, and which tensor lies where in them."""

    memory: torch.Tensor
    """uint8, as long as the file."""
    locations: Sequence[Location]

    @classmethod
    def empty(cls) -> Block:
        """No tensors."""
        return cls(torch.empty(0, dtype=torch.uint8), ())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, as views of the memory."""
        return {location.name: self._view(location) for location in self.locations}

    def _view(self, location: Location) -> torch.Tensor:
        dtype = getattr(torch, location.dtype)
        if not location.nbytes:
            return torch.empty(location.shape, dtype=dtype)
        return self.memory[location.offset : location.offset + location.nbytes].view(dtype).view(location.shape)


def lay_out(tensors: Mapping[str, torch.Tensor]) -> tuple[Location, ...]:
    """Where each tensor comes to lie; two names of one memory get one location."""
    locations, offsets = [], {}
    end = 0
    for name, tensor in tensors.items():
        dtype = dtype_name(name, tensor.dtype, tensor.layout)
        key = memory_key(tensor)
        if key not in offsets:
            offsets[key] = end
            end = round_up(end + tensor.nbytes, ALIGNMENT)
        locations.append(
            Location(
                name=name,
                dtype=dtype,
                shape=tuple(tensor.shape),
                offset=offsets[key],
                nbytes=tensor.nbytes,
            )
        )
    return tuple(locations)


def file_bytes(locations: Sequence[Location]) -> int:
    """The length of a file for these: whole pages, so that it can be written past the page cache."""
    return round_up(max((location.offset + location.nbytes for location in locations), default=0), PAGE_BYTES)


def memory_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two names of the same values in the same memory; an empty tensor has none to share."""
    if tensor.numel() == 0:
        return (object(),)
    return (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())


def dtype_name(name: str, dtype: torch.dtype, layout: torch.layout = torch.strided) -> str:
    """A dtype as the manifest writes it; one that no file can hold is refused."""
    text = str(dtype).removeprefix("torch.")
    if layout != torch.strided or text not in ITEM_BYTES:
        raise CheckpointError(
            f"Snapshot: {name!r} has dtype {text} and layout {layout}, which no checkpoint can hold; "
            "keep a dense tensor of an ordinary dtype instead."
        )
    return text


def round_up(number: int, multiple: int) -> int:
    """The next multiple that is not below the number."""
    return -(-number // multiple) * multiple
