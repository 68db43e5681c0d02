"""New data is read record by record, by number, wherever it lies."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from shoal.errors import SpecError
from shoal.feed.records import open_records, parse_line
from shoal.feed.shipping import read_samples

COUNT = 600  # more than lie between two lines whose beginnings are known


def test_lines_are_found_by_number_and_empty_ones_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "new.jsonl"
    path.write_text("\n".join(json.dumps({"at": number}) + "\n" * (number % 3) for number in range(COUNT)))
    records = open_records(path)
    assert len(records) == COUNT
    for numbers in ([0], [255, 256, 257], [599], [511, 512], [7, 5, 6]):
        assert read_samples(records, numbers) == [{"at": number} for number in numbers]


@pytest.mark.parametrize("header", ["", "left,right,name\n"])
def test_cells_are_numbers_or_texts_and_names_of_columns_are_left_out(tmp_path: Path, header: str) -> None:
    path = tmp_path / "new.csv"
    path.write_text(f'{header}1,2.5,"a, b"\n\n-3e2, 4,c\n')
    records = open_records(path)
    assert [records[number] for number in range(len(records))] == [[1.0, 2.5, "a, b"], [-300.0, 4.0, "c"]]


def test_arrays_stay_in_their_files(tmp_path: Path) -> None:
    np.save(tmp_path / "new.npy", np.arange(12).reshape(4, 3))
    records = open_records(tmp_path / "new.npy")
    assert isinstance(records, np.memmap)
    assert len(records) == 4 and records[2].tolist() == [6, 7, 8]


def test_files_of_a_folder_come_by_name(tmp_path: Path) -> None:
    for name in ("b.npy", "a.npy", ".hidden"):
        (tmp_path / name).touch()
    (tmp_path / "inner").mkdir()
    records = open_records(tmp_path)
    assert [records[number] for number in range(len(records))] == [tmp_path / "a.npy", tmp_path / "b.npy"]


def test_a_line_is_json_or_numbers_between_commas() -> None:
    assert parse_line('{"a": [1]}\n') == {"a": [1]}
    assert parse_line(" [1, 2.5]") == [1, 2.5]
    assert parse_line("1, 2.5\n") == [1.0, 2.5]


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "torn.jsonl").write_text('{"a": 1}\n{"a"')
    with pytest.raises(SpecError, match=r"record 1 of .*torn.jsonl cannot be read"):
        open_records(tmp_path / "torn.jsonl")[1]
    with pytest.raises(SpecError, match=r"'.parquet' is not known.*Choose one of: -, .csv"):
        open_records(tmp_path / "new.parquet")
    with pytest.raises(SpecError, match="there is no input"):
        open_records(tmp_path / "new.npy")
    (tmp_path / "torn.npy").write_bytes(b"torn")
    with pytest.raises(SpecError, match="is not an array that can be read"):
        open_records(tmp_path / "torn.npy")
