"""Images that callbacks log, as PNG files."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import TaskError
from shoal.observe.disk import write_whole

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
"""By number of channels: grey, colour, and colour with opacity, as the format numbers them."""


def write_picture(folder: Path, name: str, step: int, image: Any) -> Path:
    """Write an image, as a whole; where it lies."""
    pixels = pixels_of(name, image)
    folder.mkdir(exist_ok=True)
    stem = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "image"
    path = folder / f"{stem}-{step}.png"
    write_whole(path, encode(pixels))
    return path


def pixels_of(name: str, image: Any) -> np.ndarray:
    """Rows, columns and channels of an image, as whole numbers up to 255."""
    pixels = np.asarray(image.detach().cpu() if hasattr(image, "detach") else image)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim == 3 and pixels.shape[2] not in _COLOUR_TYPES:
        pixels = np.moveaxis(pixels, 0, 2)
    if pixels.ndim != 3 or pixels.shape[2] not in _COLOUR_TYPES or pixels.dtype.kind not in "biuf":
        raise TaskError(
            f"log({name!r}, …) takes a number, a text, or an image of height × width with 1, 3 or 4 channels, "
            f"found {type(image).__name__} of shape {pixels.shape} and type {pixels.dtype}."
        )
    if pixels.dtype.kind in "bf":
        pixels = np.rint(np.nan_to_num(pixels.astype(np.float32)).clip(0.0, 1.0) * 255)
    return pixels.clip(0, 255).astype(np.uint8)


def encode(pixels: np.ndarray) -> bytes:
    """The PNG of an image; each row is stored as it is, after a zero that says so."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    return _SIGNATURE + b"".join(
        _chunk(kind, data)
        for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
