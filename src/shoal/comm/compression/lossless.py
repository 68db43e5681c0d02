"""`none` and `zstd`: every bit arrives."""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

import numpy as np
import torch
import zstandard

from shoal.arena.tensors import as_bytes
from shoal.comm.codec import Frame
from shoal.comm.compression.base import Compression, Packed, take_frames, take_tensor
from shoal.errors import ProtocolError

_LEVEL = 3
# Zstandard codes blocks of 128 KiB: a smaller sample would mix the groups in one, as large tensors never do.
_SAMPLE_BYTES = 1 << 20
_SHUFFLED = "shuffled"


class Raw(Compression):
    """No compression. The frame is the tensor's own memory, which must stay as it is until it was sent, or a copy
    where that is on a device."""

    lossy: ClassVar[bool] = False
    cuts_matter: ClassVar[bool] = False

    def _encode(self, key: Hashable, values: torch.Tensor) -> Packed:
        return Packed({}, (values.detach().cpu(),))

    def _decode(self, packed: Packed, out: torch.Tensor) -> None:
        (frame,) = take_frames(packed, 1)
        out.copy_(take_tensor(frame, out.dtype, out.shape))


class Zstd(Compression):
    """Zstandard over the bytes, grouped by their place in the number where that makes them smaller.

    Signs and exponents repeat, mantissas hardly do; side by side the former compress better.
    """

    lossy: ClassVar[bool] = False

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, threads=0)
        self._decompressor = zstandard.ZstdDecompressor()

    def _encode(self, key: Hashable, values: torch.Tensor) -> Packed:
        data = _bytes_of(values.cpu())
        sample = data[: _SAMPLE_BYTES // values.itemsize]
        shuffled = len(self._compress(_shuffle(sample))) < len(self._compress(sample))
        return Packed({_SHUFFLED: shuffled}, (self._compress(_shuffle(data) if shuffled else data),))

    def _decode(self, packed: Packed, out: torch.Tensor) -> None:
        (frame,) = take_frames(packed, 1, frozenset({_SHUFFLED}))
        shuffled = packed.fields[_SHUFFLED]
        if not isinstance(shuffled, bool):
            raise ProtocolError(f"A zstd tensor is shuffled or not, found {type(shuffled).__name__}.")
        data = np.frombuffer(self._decompress(frame, out.nbytes), dtype=np.uint8)
        room = out if out.device.type == "cpu" else torch.empty_like(out, device="cpu")
        _restore(data, _bytes_of(room), shuffled=shuffled)
        if room is not out:
            out.copy_(room)

    def _compress(self, data: np.ndarray) -> bytes:
        return self._compressor.compress(data.data if data.size else b"")

    def _decompress(self, frame: Frame, num_bytes: int) -> bytes:
        if isinstance(frame, torch.Tensor):
            raise ProtocolError(f"A zstd tensor should be plain bytes, found {frame.dtype} {list(frame.shape)}.")
        try:
            # The size that a frame announces is what would be allocated, so it is read first.
            announced = zstandard.get_frame_parameters(frame).content_size
            if announced != num_bytes:
                raise ProtocolError(
                    f"A zstd tensor should unpack to {num_bytes} bytes, its frame has another size."
                )
            data = self._decompressor.decompress(frame, max_output_size=num_bytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ProtocolError(f"A zstd tensor cannot be unpacked ({error}).") from None
        if len(data) != num_bytes:
            raise ProtocolError(f"A zstd tensor should unpack to {num_bytes} bytes, found {len(data)}.")
        return data


def _bytes_of(values: torch.Tensor) -> np.ndarray:
    """The tensor's memory, one row of bytes per element."""
    return as_bytes(values.detach()).numpy().reshape(-1, values.itemsize)


def _shuffle(data: np.ndarray) -> np.ndarray:
    """All first bytes, all second bytes, and so on. NumPy does this six times faster than torch."""
    return np.ascontiguousarray(data.T)


def _restore(data: np.ndarray, target: np.ndarray, *, shuffled: bool) -> None:
    """Write the bytes back to their places, a group at a time: faster than copying the transposed whole."""
    if not shuffled:
        np.copyto(target, data.reshape(target.shape))
        return
    for number, group in enumerate(data.reshape(target.shape[::-1])):
        target[:, number] = group
