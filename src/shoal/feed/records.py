"""New data as people have it: arrays, lines and folders of files, read record by record.

Workers read by number what has an end and lies in files; nobody holds more of it than a batch.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shoal.errors import SpecError, unknown

FORMATS = (".csv", ".jsonl", ".npy")
_STRIDE = 256
"""Of every so many lines is known where the first begins."""
_BEGINS_JSON = ("[", "{", '"')


class Records(Protocol):
    """What is read, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


def open_records(path: Path) -> Records:
    """The rows of an array, the lines of a file, or the files of a folder by their names."""
    if path.is_dir():
        return FolderRecords(path)
    if path.suffix not in FORMATS:
        raise unknown("predict: the input", path.suffix or path.name, (*FORMATS, "a folder", "-"))
    if not path.is_file():
        raise SpecError(f"predict: there is no input {str(path)!r}; check the path.")
    return _open_array(path) if path.suffix == ".npy" else LineRecords(path)


def parse_line(text: str) -> Any:
    """A line of unknown kind: a JSON list, object or text; else numbers between commas."""
    return json.loads(text) if text.lstrip().startswith(_BEGINS_JSON) else parse_values(text)


def parse_values(line: str) -> list[float | str]:
    """What stands between the commas of a line: numbers, and else texts."""
    return [_value(text.strip()) for text in next(csv.reader([line]), [])]


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


class FolderRecords:
    """The paths of a folder's files in the order of their names; hidden ones are left out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = sorted(one.name for one in folder.iterdir() if one.is_file() and one.name[0] != ".")

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, number: int) -> Path:
        return self._folder / self._names[number]


class LineRecords:
    """The lines of a `.jsonl` or `.csv` file, without empty ones and, in the latter, a first one of names."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parse: Callable[[str], Any] = parse_values if path.suffix == ".csv" else json.loads
        self._length = 0
        self._offsets: list[int] = []
        offset, may_be_names = 0, path.suffix == ".csv"
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    if not (may_be_names and _is_header(line)):
                        self._note(offset)
                    may_be_names = False
                offset += len(line)

    def _note(self, offset: int) -> None:
        if self._length % _STRIDE == 0:
            self._offsets.append(offset)
        self._length += 1

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """These lines; quick where they follow each other."""
        first, last = min(numbers), max(numbers)
        lines = list(islice(self._lines_from(first), last - first + 1))
        return [self._read(number, lines[number - first]) for number in numbers]

    def _lines_from(self, number: int) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            file.seek(self._offsets[number // _STRIDE])
            yield from islice((line for line in file if line.strip()), number % _STRIDE, None)

    def _read(self, number: int, line: bytes) -> Any:
        try:
            return self._parse(line.decode("utf-8"))
        except ValueError as error:
            raise SpecError(f"predict: record {number} of {self._path} cannot be read ({error}).") from None


def _is_header(line: bytes) -> bool:
    """Whether a line names columns: there is not one number in it."""
    return all(isinstance(value, str) for value in parse_values(line.decode("utf-8", "replace")))


def _open_array(path: Path) -> Records:
    """The array stays in its file; the system reads the rows that are asked for."""
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise SpecError(f"predict: {path} is not an array that can be read ({error}).") from None
    if array.ndim == 0:
        raise SpecError(f"predict: {path} holds one number, and a row for each sample is needed.")
    return array
