"""`SavedTable`: rows of parquet files, one file for each part, as samples; `from_spark` writes them."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.datasets.in_parts import InParts
from shoal.errors import TaskError

if TYPE_CHECKING:
    import torch

_KEPT_PARTS = 8
"""How many of them a process keeps in memory."""
_DONE = "_SUCCESS"
"""What Spark leaves beside files that are all there."""


class SavedTable:
    """Rows of a folder of parquet files, in the order of their names: sample `n` is row `n` of all of them.

    `features`: a column, which may hold lists of one length, or several that make up a vector; `target`: the
    column that is learnt, none where there is none. A process reads the parts alone that it is asked for, each
    when it first is. In `in_parts()` each part is gone through by whoever it belongs to, and by nobody else.
    """

    def __init__(self, folder: str | Path, *, features: str | Sequence[str], target: str | None = None) -> None:
        self.folder = Path(folder)
        self.features = features
        self.target = target
        self.files = sorted(self.folder.glob("*.parquet"))
        if not self.files:
            raise TaskError(f"SavedTable: {self.folder} holds no parquet file; write one for each part there.")
        parquet = _parquet()
        self.sizes = [parquet.read_metadata(path).num_rows for path in self.files]
        """How many rows each part has."""
        self._ends = list(accumulate(self.sizes))
        self._kept: OrderedDict[int, tuple[torch.Tensor, ...]] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        part = bisect_right(self._ends, number)
        row = number - self._ends[part] + self.sizes[part]
        return self._sample(self._part(part), row)

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """These samples; each part is opened once for all of them."""
        found = {number: self[number] for number in sorted(set(numbers))}
        return [found[number] for number in numbers]

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def in_parts(self) -> InParts:
        """The same, gone through in parts: a file is a part of the run's ledger."""
        return InParts(self, len(self.files))

    def shard(self, num_shards: int, index: int) -> TablePart:
        """What belongs to one of so many readers: every so-manieth part."""
        return TablePart(self, range(index, len(self.files), num_shards))

    def _part(self, number: int) -> tuple[torch.Tensor, ...]:
        if number not in self._kept:
            self._kept[number] = self._read(self.files[number])
            if len(self._kept) > _KEPT_PARTS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]

    def _read(self, path: Path) -> tuple[torch.Tensor, ...]:
        import torch

        features = [self.features] if isinstance(self.features, str) else list(self.features)
        wanted = [*features, *([self.target] if self.target else [])]
        table = _parquet().read_table(path)
        if missing := [name for name in wanted if name not in table.column_names]:
            raise TaskError(
                f"SavedTable: {path.name} has no column {missing[0]!r}; it has {', '.join(table.column_names)}."
            )
        columns = [_tensor(table.column(name), name) for name in wanted]
        inputs = columns[: len(features)]
        x = inputs[0] if isinstance(self.features, str) else torch.stack([one.float() for one in inputs], dim=1)
        return (x, columns[-1]) if self.target else (x,)

    def _sample(self, part: tuple[torch.Tensor, ...], row: int) -> Any:
        return tuple(column[row] for column in part) if self.target else part[0][row]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": OrderedDict()}


class TablePart:
    """Some parts of a table, from the first row to the last."""

    def __init__(self, table: SavedTable, parts: range) -> None:
        self._table = table
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        for number in self._parts:
            part = self._table._read(self._table.files[number])
            for row in range(self._table.sizes[number]):
                yield self._table._sample(part, row)


def from_spark(
    frame: Any, folder: str | Path, *, features: str | Sequence[str], target: str | None = None
) -> SavedTable:
    """A DataFrame of Spark's, or an RDD of rows, as a data set: written once, a parquet file for each partition.

    The folder must be one that all hosts of a run reach. One that a DataFrame has been written to is read again,
    and nothing is written: give another folder where the DataFrame is another.
    """
    folder = Path(folder)
    if not (folder / _DONE).exists():
        rows = frame if hasattr(frame, "write") else frame.toDF()
        rows.write.mode("overwrite").parquet(folder.absolute().as_uri())
    return SavedTable(folder, features=features, target=target)


def _tensor(column: Any, name: str) -> torch.Tensor:
    """A column of numbers, or of lists of numbers that have one length: floats as float32, the rest as it is."""
    import pyarrow
    import torch

    array = column.combine_chunks()
    array = array.combine_chunks() if isinstance(array, pyarrow.ChunkedArray) else array
    width = None
    if pyarrow.types.is_list(array.type) or pyarrow.types.is_large_list(array.type):
        width = len(array.flatten()) // max(1, len(array))
        if len(set(array.value_lengths().to_pylist())) > 1:
            raise TaskError(f"SavedTable: the lists of column {name!r} have several lengths; pad or cut them.")
        array = array.flatten()
    if array.null_count:
        raise TaskError(f"SavedTable: column {name!r} has {array.null_count} empty cells; fill or drop them.")
    try:
        values = torch.from_numpy(array.to_numpy(zero_copy_only=False).copy())
    except TypeError:
        raise TaskError(
            f"SavedTable: column {name!r} is of {array.type}, no numbers; make numbers of it."
        ) from None
    values = values.float() if values.is_floating_point() else values
    return values if width is None else values.reshape(-1, width)


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise TaskError("SavedTable: parquet files need pyarrow; pip install shoal[spark].") from None
    return pyarrow.parquet
