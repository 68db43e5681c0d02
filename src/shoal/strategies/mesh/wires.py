"""Tensors from one worker to another. Where the receiver cannot know the shape, a short header says it."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from shoal.strategies.mesh.axes import Axis

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_MOST_DIMS = 14
_NOTHING = -1


def send(tensor: torch.Tensor | None, to: int, axis: Axis) -> None:
    """Send a tensor, or word that there is none, to the one with this index in line."""
    header = torch.full((2 + _MOST_DIMS,), _NOTHING)
    if tensor is not None:
        header[0], header[1] = _DTYPES.index(tensor.dtype), tensor.dim()
        header[2 : 2 + tensor.dim()] = torch.tensor(tensor.shape, dtype=torch.int64)
    dist.send(header, axis.ranks[to], group=axis.group)
    if tensor is not None and tensor.numel():
        dist.send(as_bytes(tensor.detach().cpu().contiguous()), axis.ranks[to], group=axis.group)


def receive(sender: int, axis: Axis) -> torch.Tensor | None:
    """What the one with this index sent, in the host's memory; None where it had nothing."""
    header = torch.empty(2 + _MOST_DIMS, dtype=torch.int64)
    dist.recv(header, axis.ranks[sender], group=axis.group)
    kind, dims, *sizes = header.tolist()
    if kind == _NOTHING:
        return None
    tensor = torch.empty(sizes[:dims], dtype=_DTYPES[kind])
    if tensor.numel():
        dist.recv(as_bytes(tensor), axis.ranks[sender], group=axis.group)
    return tensor


def send_values(tensor: torch.Tensor, to: int, axis: Axis) -> None:
    """Send values to the one with this index in line, who knows their shape; waits until it takes them."""
    if tensor.numel():
        axis.wait()
        dist.send(as_bytes(tensor.detach().cpu().contiguous()), axis.ranks[to], group=axis.group)


def receive_values(room: torch.Tensor, sender: int, axis: Axis) -> None:
    """Fill a tensor of the host, whose elements lie side by side."""
    if room.numel():
        axis.wait()
        dist.recv(as_bytes(room), axis.ranks[sender], group=axis.group)


def share_plain(value: Any, axis: Axis) -> list[Any]:
    """What everybody in line gives, by index: plain JSON data of any length."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [int(length) for length in axis.all_gather(torch.tensor([len(text)]))]
    rows = axis.all_gather(torch.nn.functional.pad(text, (0, max(lengths) - len(text))))
    return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, for a backend that does not know every dtype."""
    return tensor.view(-1).view(torch.uint8)
