"""Saved models: whole or not at all, and known by one digest."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from shoal.checkpoint.folder import load_model
from shoal.checkpoint.model_file import digest, load_tensors
from shoal.checkpoint.model_stream import save_tensors
from shoal.errors import CheckpointError, LaunchError

TENSORS = {
    "weight": torch.randn(3, 4),
    "narrow": torch.randn(5).to(torch.bfloat16),
    "count": torch.tensor(7),
    "flags": torch.tensor([True, False]),
    "empty": torch.empty(0, 3),
    "columns": torch.randn(4, 6).t(),
}


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    key = save_tensors(tmp_path / "m.safetensors", TENSORS, steps="5")
    loaded = load_tensors(tmp_path / "m.safetensors")
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name
    assert key == digest(TENSORS) == digest(loaded)
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == {"digest": key, "steps": "5"}
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_a_digest_sees_names_shapes_types_and_bits_but_no_order() -> None:
    base = {"a": torch.zeros(2, 3), "b": torch.ones(1)}
    assert digest(base) == digest(dict(reversed(base.items())))
    others = [
        {**base, "a": torch.zeros(3, 2)},
        {**base, "a": torch.zeros(2, 3, dtype=torch.int32)},
        {**base, "a": -torch.zeros(2, 3)},
        {"c": base["a"], "b": base["b"]},
        {"a": base["a"]},
        {**base, "c": torch.empty(0)},
    ]
    assert len({digest(tensors) for tensors in [base, *others]}) == 1 + len(others)
    assert digest({"a": torch.arange(6.0).view(2, 3).t()}) == digest(
        {"a": torch.arange(6.0).view(2, 3).t().clone()}
    )


def test_tied_and_overlapping_weights_keep_all_their_names(tmp_path: Path) -> None:
    block = torch.arange(10.0)
    tensors = {"head": block, "tokens": block, "slice": block[2:6], "part": block[4:]}
    save_tensors(tmp_path / "m.safetensors", tensors)
    loaded = load_tensors(tmp_path / "m.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("place", [-1, 200])
def test_a_changed_byte_is_noticed(tmp_path: Path, place: int) -> None:
    path = tmp_path / "m.safetensors"
    save_tensors(path, {"weight": torch.zeros(100)})
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"was changed since it was written|is not a whole safetensors file"):
        load_tensors(path)


@pytest.mark.parametrize("kept", [0, 4, 60, -10])
def test_a_torn_file_is_noticed(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "m.safetensors"
    save_tensors(path, {"weight": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        load_tensors(path)


def test_a_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(CheckpointError, match="There is no saved model at"):
            load_tensors(path)


def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_tensors(path, nn.Linear(3, 2).state_dict())
    twin = nn.Linear(3, 2)
    load_model(path, twin)
    assert digest(twin.state_dict()) == digest(load_tensors(path))
    for other in (nn.Linear(4, 2), nn.Linear(3, 2, bias=False)):
        with pytest.raises(CheckpointError, match="does not fit the task's model"):
            load_model(path, other)


@contextmanager
def no_file_larger_than(nbytes: int) -> Iterator[None]:
    """Writing more fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_refuses_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    key = save_tensors(path, {"weight": torch.zeros(10)})
    with no_file_larger_than(100_000), pytest.raises(LaunchError, match="the disk is full"):
        save_tensors(path, {"weight": torch.ones(1_000_000)})
    assert digest(load_tensors(path)) == key
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="nowhere: it is not there, or no folder"):
        save_tensors(tmp_path / "nowhere" / "m.safetensors", {"weight": torch.ones(1)})
