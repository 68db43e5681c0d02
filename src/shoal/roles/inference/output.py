"""Files of predictions that grow by whole batches, in order: `.jsonl`, `.csv` and `.npy`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from shoal.arena import Segment, counter_bytes
from shoal.errors import SpecError, unknown
from shoal.observe.disk import writing
from shoal.roles.inference.rows import ONLY
from shoal.spec import World

FORMATS = (".csv", ".jsonl", ".npy")
Rows = Mapping[str, np.ndarray]
"""By name: what the model returned for each sample."""


class Output(Protocol):
    """A file of predictions. Several processes append in turn; the first batch begins the file."""

    def append(self, rows: Rows, *, first: bool) -> None: ...


def open_output(path: Path, num_rows: int) -> Output:
    """The output that a path's ending names."""
    if path.suffix not in FORMATS:
        raise unknown("predict: the format", path.suffix or path.name, FORMATS)
    return NumpyOutput(path, num_rows) if path.suffix == ".npy" else TextOutput(path)


class WritingOrder:
    """Whose turn it is: one counter in memory that the writing processes share."""

    def __init__(self, world: World) -> None:
        segment = Segment(world.arena_fd)
        segment.reserve("counters", counter_bytes(1))
        segment.map()
        self._written = segment.counters("counters")
        segment.close()

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Write this batch now that all before it are there."""
        self._written.wait(0, number)
        yield
        self._written.publish(0, number + 1)


class TextOutput:
    """One line per sample: a JSON value, or comma-separated numbers."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, rows: Rows, *, first: bool) -> None:
        with writing(self._path.parent), self._path.open("w" if first else "a", encoding="utf-8") as file:
            lines = json_lines(rows) if self._path.suffix == ".jsonl" else csv_lines(rows)
            file.writelines(f"{line}\n" for line in lines)


class NumpyOutput:
    """One array; its header states the final shape from the start, and rows fill it as they come."""

    def __init__(self, path: Path, num_rows: int) -> None:
        self._path = path
        self._num_rows = num_rows

    def append(self, rows: Rows, *, first: bool) -> None:
        array = main_rows(rows, self._path.suffix)
        with writing(self._path.parent), self._path.open("wb" if first else "ab") as file:
            if first:
                shape = (self._num_rows, *array.shape[1:])
                header = {"descr": array.dtype.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(array.tobytes())


def json_lines(rows: Rows) -> Iterator[str]:
    """A JSON value for each sample: an object by name where the model has several outputs."""
    values = {name: array.tolist() for name, array in rows.items()}
    if values.keys() == {ONLY}:
        return map(json.dumps, values[ONLY])
    return (json.dumps(dict(zip(values, row, strict=True))) for row in zip(*values.values(), strict=True))


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
