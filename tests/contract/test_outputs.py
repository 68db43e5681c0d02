"""One suite for every file of predictions: it grows by whole batches, and is whole at the end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.errors import LaunchError, SpecError
from shoal.roles.inference.output import open_output
from shoal.roles.inference.rows import rows_of


def write(path: Path, rows: torch.Tensor, size: int = 2) -> None:
    for start in range(0, len(rows), size):
        # Another process each time: nothing is kept open in between.
        batch = rows[start : start + size]
        open_output(path, len(rows)).append(rows_of(batch, len(batch)), first=start == 0)


ROWS = {
    "numbers": torch.arange(5),
    "vectors": torch.arange(15.0).view(5, 3) / 7,
    "tables": torch.arange(30.0).view(5, 3, 2),
    "narrow": torch.arange(5.0).to(torch.bfloat16).view(5, 1),
    "flags": torch.tensor([True, False, True, True, False]),
}


@pytest.mark.parametrize("kind", ROWS)
def test_numpy_reads_what_was_written(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out.npy"
    write(path, ROWS[kind])
    array = np.load(path)
    assert array.shape == tuple(ROWS[kind].shape)
    assert np.array_equal(array, ROWS[kind].float().numpy() if kind == "narrow" else ROWS[kind].numpy())


@pytest.mark.parametrize("kind", ROWS)
def test_a_json_value_per_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("an older file\n")
    write(path, ROWS[kind])
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS[kind].tolist()


@pytest.mark.parametrize("kind", ["numbers", "vectors", "tables", "narrow"])
def test_plain_numbers_between_commas(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out.csv"
    write(path, ROWS[kind])
    values = [[float(cell) for cell in line.split(",")] for line in path.read_text().splitlines()]
    assert values == ROWS[kind].double().reshape(5, -1).tolist()


def test_unknown_formats_are_told_the_known_ones(tmp_path: Path) -> None:
    for name in ("out.json", "out"):
        with pytest.raises(SpecError, match=r"Choose one of: \.csv, \.jsonl, \.npy"):
            open_output(tmp_path / name, 3)


def test_a_full_disk_is_said_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.symlink_to("/dev/full")
    with pytest.raises(LaunchError, match="the disk is full"):
        write(path, ROWS["vectors"])
