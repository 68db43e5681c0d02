"""Where rows go, batch by batch and in order: files `.jsonl`, `.csv` and `.npy`, and standard output."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from shoal.comm.desk_words import ONLY
from shoal.errors import SpecError, unknown
from shoal.launch.prediction.desk import Rows
from shoal.observe.disk import writing

if TYPE_CHECKING:
    import numpy as np

FORMATS = (".csv", ".jsonl", ".npy")
_HEADER_BYTES = 256
"""Room for what an array's header says, which changes with every batch."""
_NUMPY = b"\x93NUMPY\x01\x00"


class Output(Protocol):
    """Takes rows, and has them where others read them when `append` returns."""

    def append(self, rows: Rows) -> None: ...

    def close(self) -> None:
        """There are no more. Called once, where all went well."""


def open_output(path: Path) -> Output:
    """The output that a path's ending names. What lies there is replaced when the first rows come."""
    if path.suffix not in FORMATS:
        raise unknown("predict: the format", path.suffix or path.name, FORMATS)
    return NumpyOutput(path) if path.suffix == ".npy" else TextOutput(path)


class StreamOutput:
    """JSON lines for whoever reads a stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def append(self, rows: Rows) -> None:
        self._stream.writelines(f"{line}\n" for line in json_lines(rows))
        self._stream.flush()

    def close(self) -> None:
        """The stream is somebody else's."""


class RowFile:
    """A file that grows; every write is on its way to the disk at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def write(self, data: bytes) -> None:
        """Write behind what is there."""
        with writing(self._path.parent):
            if self._file is None:
                self._file = FileIO(self._path, "w")
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) or 0 :]

    def rewrite_beginning(self, data: bytes) -> None:
        """Write over the first bytes."""
        assert self._file is not None
        with writing(self._path.parent):
            os.pwrite(self._file.fileno(), data, 0)

    def close(self) -> None:
        """Where nothing was written, the file is empty."""
        self.write(b"")
        assert self._file is not None
        self._file.close()


class TextOutput:
    """One line per sample: a JSON value, or comma-separated numbers."""

    def __init__(self, path: Path) -> None:
        self._lines = json_lines if path.suffix == ".jsonl" else csv_lines
        self._file = RowFile(path)

    def append(self, rows: Rows) -> None:
        self._file.write("".join(f"{line}\n" for line in self._lines(rows)).encode())

    def close(self) -> None:
        self._file.close()


class NumpyOutput:
    """One array, whose header says at any time how many rows there are."""

    def __init__(self, path: Path) -> None:
        self._file = RowFile(path)
        self._num_rows = 0
        self._form: tuple[str, tuple[int, ...]] | None = None
        """Type and shape of a row."""

    def append(self, rows: Rows) -> None:
        array = main_rows(rows, ".npy")
        form = array.dtype.str, array.shape[1:]
        if self._form is None:
            self._begin(form)
        elif self._form != form:
            raise SpecError(
                f"predict: a row has shape {form[1]} and type {form[0]} now, but those before had {self._form[1]} "
                f"and {self._form[0]}, and an array has but one; write .jsonl."
            )
        self._file.write(array.tobytes())
        self._num_rows += len(array)
        self._file.rewrite_beginning(self._header())

    def close(self) -> None:
        if self._form is None:
            self._begin(("<f4", ()))
        self._file.close()

    def _begin(self, form: tuple[str, tuple[int, ...]]) -> None:
        self._form = form
        self._file.write(self._header())

    def _header(self) -> bytes:
        assert self._form is not None
        shape = (self._num_rows, *self._form[1])
        text = repr({"descr": self._form[0], "fortran_order": False, "shape": shape})
        room = _HEADER_BYTES - len(_NUMPY) - 2
        return _NUMPY + struct.pack("<H", room) + text.ljust(room - 1).encode("latin1") + b"\n"


def json_lines(rows: Rows) -> Iterator[str]:
    """A JSON value for each sample: an object by name where the model has several outputs."""
    return (json.dumps(row) for row in plain_rows(rows))


def plain_rows(rows: Rows) -> Iterator[Any]:
    """The rows one by one, as lists and numbers."""
    return each_row({name: array.tolist() for name, array in rows.items()})


def each_row(rows: Any) -> Iterator[Any]:
    """The rows one by one; dicts where the model has several outputs."""
    if rows.keys() == {ONLY}:
        return iter(rows[ONLY])
    return (dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True))


def csv_lines(rows: Rows) -> Iterator[str]:
    """The numbers of each sample."""
    array = main_rows(rows, ".csv")
    return (",".join(map(str, row)) for row in array.reshape(len(array), -1).tolist())


def main_rows(rows: Rows, ending: str) -> np.ndarray:
    """The one output that a file of numbers alone can hold."""
    name = ONLY if ONLY in rows else "logits"
    if name not in rows:
        raise SpecError(
            f"predict: the model returns {', '.join(rows)} for each sample, and a file {ending} holds one of "
            "them; write .jsonl, or let the model return its main output alone."
        )
    return rows[name]
