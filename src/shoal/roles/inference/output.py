"""Files of predictions that grow by whole batches, in order: `.jsonl`, `.csv` and `.npy`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from shoal.arena import Segment, counter_bytes
from shoal.errors import unknown
from shoal.observe.disk import writing
from shoal.spec import World

FORMATS = (".csv", ".jsonl", ".npy")


class Output(Protocol):
    """A file of predictions. Several processes append in turn; the first batch begins the file."""

    def append(self, rows: torch.Tensor, *, first: bool) -> None: ...


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

    def append(self, rows: torch.Tensor, *, first: bool) -> None:
        with writing(self._path.parent), self._path.open("w" if first else "a", encoding="utf-8") as file:
            if self._path.suffix == ".jsonl":
                lines = [json.dumps(row) for row in rows.tolist()]
            else:
                lines = [",".join(map(str, row)) for row in rows.reshape(len(rows), -1).tolist()]
            file.writelines(f"{line}\n" for line in lines)


class NumpyOutput:
    """One array; its header states the final shape from the start, and rows fill it as they come."""

    def __init__(self, path: Path, num_rows: int) -> None:
        self._path = path
        self._num_rows = num_rows

    def append(self, rows: torch.Tensor, *, first: bool) -> None:
        array = np.ascontiguousarray(rows.float().numpy() if rows.dtype == torch.bfloat16 else rows.numpy())
        with writing(self._path.parent), self._path.open("wb" if first else "ab") as file:
            if first:
                shape = (self._num_rows, *array.shape[1:])
                header = {"descr": array.dtype.str, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(array.tobytes())
