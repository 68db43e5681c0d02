"""Batches handed from one process to another through memory that both map; nothing is pickled.

tensor | tensor | … | msgpack [structure, [[dtype, shape, strides, offset], …]]
"""

from __future__ import annotations

import math
import mmap
import os
from typing import Any

import msgpack
import torch

from shoal.comm.codec import Frame
from shoal.errors import TaskError
from shoal.feed.sample_codec import pack, unpack

_ALIGNMENT = 64


def lay_down(value: Any) -> tuple[int, int]:
    """A file in memory that holds this batch, and how long its header is; `TaskError` for what cannot be sent."""
    frames: list[Frame] = []
    structure = pack(value, frames, "loaders: a batch")
    entries, end = [], 0
    fd = os.memfd_create("shoal-batch")
    try:
        for frame in frames:
            tensor = _dense(frame)
            name = str(tensor.dtype).removeprefix("torch.")
            entries.append([name, list(tensor.shape), list(tensor.stride()), end])
            if tensor.numel():
                flat = torch.as_strided(tensor, (tensor.numel(),), (1,))
                _write(fd, flat.view(torch.uint8).numpy().data, end)
            end = -(-(end + tensor.nbytes) // _ALIGNMENT) * _ALIGNMENT
        header = msgpack.packb([structure, entries])
        _write(fd, memoryview(header), end)
    except BaseException:
        os.close(fd)
        raise
    return fd, len(header)


def pick_up(fd: int, header_bytes: int) -> Any:
    """The batch that `lay_down` wrote. Its tensors are that memory, which is let go with the last of them."""
    try:
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
    structure, entries = msgpack.unpackb(memory[-header_bytes:], strict_map_key=False)
    return unpack(structure, [_tensor(memory, *entry) for entry in entries])


def _dense(frame: Any) -> torch.Tensor:
    """The same tensor without gaps, in the order of its memory: kernels may add up in another order for others."""
    if frame.layout != torch.strided or frame.device.type != "cpu" or frame.is_quantized:
        raise TaskError(
            f"loaders: a batch holds a tensor of type {frame.dtype}, {frame.layout}, on {frame.device}; "
            "let data set and collate make dense tensors on the CPU."
        )
    plain = frame.detach().resolve_conj().resolve_neg()
    return plain if plain.is_contiguous() else plain.clone()


def _write(fd: int, view: memoryview, offset: int) -> None:
    while view.nbytes:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _tensor(memory: mmap.mmap, name: str, shape: list[int], strides: list[int], offset: int) -> torch.Tensor:
    dtype, count = getattr(torch, name), math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.as_strided(torch.frombuffer(memory, dtype=dtype, count=count, offset=offset), shape, strides)
