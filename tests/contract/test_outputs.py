"""One suite for whatever takes rows: each batch is there when it was appended, and all is whole at the end."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.comm.desk_words import ONLY
from shoal.errors import LaunchError, SpecError
from shoal.launch.prediction.output import StreamOutput, open_output
from shoal.roles.inference.rows import rows_of


def write(path: Path, rows: torch.Tensor, size: int = 2) -> None:
    output = open_output(path)
    for batch in rows.split(size):
        output.append(rows_of(batch, len(batch)))
    output.close()


ROWS = {
    "numbers": torch.arange(5),
    "vectors": torch.arange(15.0).view(5, 3) / 7,
    "tables": torch.arange(30.0).view(5, 3, 2),
    "narrow": torch.arange(5.0).to(torch.bfloat16).view(5, 1),
    "flags": torch.tensor([True, False, True, True, False]),
}
SEVERAL = {"logits": ROWS["vectors"].numpy(), "best": ROWS["numbers"].numpy()}


@pytest.mark.parametrize("kind", ROWS)
def test_numpy_reads_what_was_written(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out.npy"
    write(path, ROWS[kind])
    array = np.load(path)
    assert array.shape == tuple(ROWS[kind].shape)
    assert np.array_equal(array, ROWS[kind].float().numpy() if kind == "narrow" else ROWS[kind].numpy())


def test_an_array_is_whole_after_each_batch(tmp_path: Path) -> None:
    output = open_output(tmp_path / "out.npy")
    for end in (2, 4, 5):
        output.append({ONLY: ROWS["vectors"].numpy()[end - 2 if end < 5 else 4 : end]})
        assert np.array_equal(np.load(tmp_path / "out.npy"), ROWS["vectors"].numpy()[:end])


def test_rows_of_another_shape_do_not_fit_an_array(tmp_path: Path) -> None:
    output = open_output(tmp_path / "out.npy")
    output.append({ONLY: np.zeros((2, 3), dtype=np.float32)})
    with pytest.raises(SpecError, match=r"shape \(4,\) .* those before had \(3,\).*write .jsonl"):
        output.append({ONLY: np.zeros((2, 4), dtype=np.float32)})


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


def test_a_stream_gets_json_lines() -> None:
    stream = io.StringIO()
    StreamOutput(stream).append({ONLY: ROWS["vectors"].numpy()})
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == ROWS["vectors"].tolist()


def test_several_outputs_are_objects_and_of_numbers_alone_the_main_one_is_kept(tmp_path: Path) -> None:
    for ending in (".jsonl", ".npy", ".csv"):
        open_output(tmp_path / f"out{ending}").append(SEVERAL)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["best"] for row in rows] == list(range(5))
    assert [row["logits"] for row in rows] == SEVERAL["logits"].tolist()
    assert np.array_equal(np.load(tmp_path / "out.npy"), SEVERAL["logits"])
    assert (tmp_path / "out.csv").read_text().count("\n") == 5
    with pytest.raises(SpecError, match=r"returns best, scores for each sample, and a file .npy holds one"):
        open_output(tmp_path / "none.npy").append({"best": SEVERAL["best"], "scores": SEVERAL["logits"]})


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".npy"])
def test_without_rows_there_is_an_empty_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"out{ending}"
    path.write_text("an older file\n")
    open_output(path).close()
    assert len(np.load(path)) == 0 if ending == ".npy" else path.read_text() == ""


def test_an_older_file_stays_until_there_are_rows(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("an older file\n")
    open_output(path)
    assert path.read_text() == "an older file\n"


def test_unknown_formats_are_told_the_known_ones(tmp_path: Path) -> None:
    for name in ("out.json", "out"):
        with pytest.raises(SpecError, match=r"Choose one of: \.csv, \.jsonl, \.npy"):
            open_output(tmp_path / name)


def test_a_full_disk_is_said_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.symlink_to("/dev/full")
    with pytest.raises(LaunchError, match="the disk is full"):
        write(path, ROWS["vectors"])
