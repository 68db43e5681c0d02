"""Tensors that go over the wire as a compression packs them."""

from __future__ import annotations

import torch

from shoal.comm import codec
from shoal.comm.codec import Message
from shoal.comm.compression import Compression, Packed, make_compression


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def over_the_wire(packed: Packed) -> Packed:
    """What a peer receives: through the message codec, as bytes."""
    buffers = codec.encode(Message("push", packed.fields, packed.frames))
    message = codec.decode([bytearray(buffer) for buffer in buffers])
    return Packed(message.fields, tuple(message.frames))


def carried(compression: Compression, values: torch.Tensor) -> torch.Tensor:
    out = torch.full(values.shape, 7.0, dtype=values.dtype)
    make_compression(compression.text).decode(over_the_wire(compression.encode("w", values)), out)
    return out
