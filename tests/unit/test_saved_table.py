"""Parquet files as a data set: what Spark has written, and anybody else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.datasets import SavedTable, from_spark
from shoal.datasets.parted import Parted
from shoal.errors import TaskError

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install shoal[spark]")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three parts of 4, 0 and 3 rows: row `n` has a=n, b=10n, v=[n, n+1], y=n%2."""
    begin = 0
    for part, size in enumerate((4, 0, 3)):
        rows = range(begin, begin + size)
        columns = {
            "a": pyarrow.array([float(n) for n in rows], pyarrow.float64()),
            "b": pyarrow.array([10 * n for n in rows], pyarrow.int32()),
            "v": pyarrow.array([[float(n), n + 1.0] for n in rows], pyarrow.list_(pyarrow.float32())),
            "y": pyarrow.array([n % 2 for n in rows], pyarrow.int64()),
            "s": pyarrow.array([str(n) for n in rows], pyarrow.string()),
        }
        parquet.write_table(pyarrow.table(columns), tmp_path / f"part-0000{part}.parquet")
        begin += size
    return tmp_path


def test_rows_are_samples_in_the_order_of_parts(folder: Path) -> None:
    table = SavedTable(folder, features=["a", "b"], target="y")
    assert len(table) == 7 and table.sizes == [4, 0, 3]
    x, y = table[5]
    assert x.tolist() == [5.0, 50.0] and x.dtype == torch.float32 and (y.item(), y.dtype) == (1, torch.int64)
    assert [x[0].item() for x, _ in table.__getitems__([6, 0, 4, 4])] == [6.0, 0.0, 4.0, 4.0]
    with pytest.raises(IndexError):
        table[7]


def test_a_column_may_be_the_whole_sample(folder: Path) -> None:
    assert SavedTable(folder, features="v")[6].tolist() == [6.0, 7.0]


def test_each_part_is_gone_through_by_itself(folder: Path) -> None:
    """Sample n of a run is row n // parts of part n % parts, as `Parted` deals them."""
    (folder / "part-00001.parquet").unlink()  # A part without rows would never yield one.
    table = SavedTable(folder, features=["a"])
    assert [x.item() for x in table.shard(2, 1)] == [4.0, 5.0, 6.0]
    parted = Parted(table.in_parts(), seed=0, keep=8)
    assert [x.item() for x in parted.__getitems__(range(8))] == [0.0, 4.0, 1.0, 5.0, 2.0, 6.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("features", "sentence"),
    [("z", "has no column 'z'; it has a, b, v, y, s"), ("s", "column 's' is of string, no numbers")],
)
def test_what_cannot_be_read_is_said(folder: Path, features: str, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        SavedTable(folder, features=features)[0]


def test_empty_cells_and_uneven_lists_are_named(tmp_path: Path) -> None:
    table = pyarrow.table({"a": pyarrow.array([1.0, None]), "v": pyarrow.array([[1.0], [1.0, 2.0]])})
    parquet.write_table(table, tmp_path / "one.parquet")
    with pytest.raises(TaskError, match="column 'a' has 1 empty cells"):
        SavedTable(tmp_path, features="a")[0]
    with pytest.raises(TaskError, match="the lists of column 'v' have several lengths"):
        SavedTable(tmp_path, features="v")[0]
    with pytest.raises(TaskError, match="holds no parquet file"):
        SavedTable(tmp_path / "nowhere", features="a")


def test_what_was_written_is_not_written_again(folder: Path) -> None:
    (folder / "_SUCCESS").touch()
    assert len(from_spark(None, folder, features="a")) == 7
