"""`RecordFile`: records with checksums one after the other, as TensorBoard reads them.

Its own package computes a checksum byte by byte in Python, which is most of the work of telling it a number. Here
those of all records that are written at once are computed together.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_CASTAGNOLI = 0x82F63B78
"""The polynomial of CRC-32C, its lowest power first."""
_MASK_DELTA = 0xA282EAD8
"""Stored checksums are turned and moved by this: one of data that holds checksums would say little."""

_MANY = 16


class RecordFile:
    """A file that grows by whole records."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, records: Sequence[bytes]) -> None:
        """Append these, and let readers see them."""
        lengths = [struct.pack("<Q", len(record)) for record in records]
        sums = masked_checksums([*lengths, *records])
        of_lengths, of_records = sums[: len(records)], sums[len(records) :]
        for length, of_length, record, of_record in zip(lengths, of_lengths, records, of_records, strict=True):
            self._file.write(length + of_length + record + of_record)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def masked_checksums(texts: Sequence[bytes]) -> list[bytes]:
    """The CRC-32C of each, masked, as four bytes; none has fewer than four itself."""
    import numpy as np

    # A checksum begins with ones, which is as if it began with zero and the first four bytes were turned over. One
    # that begins with zero does not see zeros that come first: all can be made equally long, and go on together.
    longest = max(map(len, texts))
    longest += longest % 2
    turned = np.frombuffer(b"".join(text.rjust(longest, b"\0") for text in texts), dtype=np.uint8).copy()
    ends = np.arange(1, len(texts) + 1) * longest
    starts = ends - np.array([len(text) for text in texts])
    turned[starts[:, None] + np.arange(4)] ^= 0xFF
    words = turned.view("<u2").reshape(len(texts), -1)
    sums = ~(
        _together(words) if len(texts) >= _MANY else np.array([_alone(row) for row in words], dtype=np.uint32)
    )
    masked = (((sums >> 15) | (sums << 17)) + np.uint32(_MASK_DELTA)).astype("<u4").tobytes()
    return [masked[start : start + 4] for start in range(0, len(masked), 4)]


def _together(words: np.ndarray) -> np.ndarray:
    """The checksum of each row, all moved on by one word at a time."""
    import numpy as np

    table, sums = _table(), np.zeros(len(words), dtype=np.uint32)
    for column in words.T.astype(np.uint32):
        sums = table[(sums ^ column) & 0xFFFF] ^ (sums >> 16)
    return sums


def _alone(row: np.ndarray) -> int:
    """The same of one row, which may be a whole picture: an array of one number is slower than a number."""
    table, found = _table().data, 0
    for word in row.tolist():
        found = table[(found ^ word) & 0xFFFF] ^ (found >> 16)
    return found


@cache
def _table() -> np.ndarray:
    """By two bytes: what their sixteen bits make of a checksum."""
    import numpy as np

    table: np.ndarray = np.arange(1 << 16, dtype=np.uint32)
    for _ in range(16):
        table = (table >> 1) ^ ((table & 1) * _CASTAGNOLI).astype(np.uint32)
    return table
