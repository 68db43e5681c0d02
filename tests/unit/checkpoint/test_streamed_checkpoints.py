"""Checkpoints of a state that comes tensor by tensor, and tensors that are read one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers.checkpoint_states import assert_same, state
from shoal.checkpoint.listing import read_manifest
from shoal.checkpoint.model_file import digest
from shoal.checkpoint.model_stream import TensorStream, save_tensors
from shoal.checkpoint.saver import BackgroundSaver
from shoal.checkpoint.snapshot import Snapshot
from shoal.checkpoint.store import CheckpointStore
from shoal.checkpoint.stored import ModelReader, PartReader, StoredTensor
from shoal.checkpoint.streamed import StreamedState
from shoal.checkpoint.wholeness import check_folder
from shoal.errors import CheckpointError, LaunchError


def streamed(whole: Snapshot) -> StreamedState:
    return StreamedState(
        step=whole.step,
        model=TensorStream.of(whole.model),
        optimizer=TensorStream.of(whole.optimizer),
        losses=whole.losses,
        facts=whole.facts,
    )


def save(store: CheckpointStore, whole: Snapshot) -> Path:
    return store.finish(store.take(streamed(whole))).path


def values(stored: StoredTensor) -> torch.Tensor:
    return stored.file.read_into(stored.offset, torch.empty(stored.shape, dtype=stored.dtype))


@pytest.mark.parametrize("chunk_bytes", [64 << 20, 4096, 1000])
def test_what_came_is_what_is_loaded(tmp_path: Path, chunk_bytes: int) -> None:
    whole = replace(state(), rng={})
    store = CheckpointStore(tmp_path, chunk_bytes=chunk_bytes)
    path = save(store, whole)
    assert check_folder(path).digest == digest(whole.model)
    assert_same(store.latest(pytest.fail), whole)


def test_both_ways_to_save_write_the_same_files(tmp_path: Path) -> None:
    """Of tensors whose names come sorted: a whole state keeps its own order."""
    whole = replace(state(), rng={})
    whole = replace(
        whole, model=dict(sorted(whole.model.items())), optimizer=dict(sorted(whole.optimizer.items()))
    )
    one = save(CheckpointStore(tmp_path / "streamed", chunk_bytes=8192), whole)
    other = CheckpointStore(tmp_path / "whole", chunk_bytes=8192).save(whole).path
    for name in ("model.bin", "optimizer.bin", "losses.bin"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert read_manifest(one).files == read_manifest(other).files


def test_it_appears_when_all_is_on_the_disk(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, state(10))
    folder = store.take(streamed(state(20)))
    assert [entry.step for entry in store.entries()] == [10]
    store.finish(folder)
    assert [entry.step for entry in store.entries()] == [10, 20]


def test_where_the_disk_refuses_all_is_taken_and_nothing_is_left(tmp_path: Path) -> None:
    """Others wait until what they send is taken."""
    store, whole = CheckpointStore(tmp_path / "runs"), state()
    taken: list[str] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in sorted(whole.model):
            taken.append(name)
            (store.folder / ".step-000000200.part" / "optimizer.bin").mkdir(exist_ok=True)  # in the way
            yield name, whole.model[name]

    coming = replace(streamed(whole), model=replace(TensorStream.of(whole.model), tensors=tensors()))
    folder = store.take(coming)
    assert taken == sorted(whole.model)
    assert next(coming.optimizer.tensors, None) is None
    with pytest.raises((LaunchError, OSError)):
        store.finish(folder)
    assert os.listdir(store.folder) == []

    failures: list[str] = []
    saver = BackgroundSaver(store, lambda entry, stall_s: pytest.fail(), failures.append)
    store.folder.rmdir()
    store.folder.write_text("a file")
    saver.take(streamed(whole))
    saver.close()
    assert len(failures) == 1 and failures[0].startswith("step 200 was not saved")


def test_tensors_are_read_one_by_one(tmp_path: Path) -> None:
    whole = state()
    path = save(CheckpointStore(tmp_path, chunk_bytes=4096), whole)
    stored = PartReader(path, "model", read_manifest(path)).tensors()
    assert stored.keys() == whole.model.keys()
    assert digest({name: values(tensor) for name, tensor in stored.items()}) == digest(whole.model)


def test_only_the_chunks_of_what_is_read_are_checked(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path, chunk_bytes=4096), state())
    manifest = read_manifest(path)
    first, *_, last = sorted(manifest.files["model"].locations, key=lambda one: (one.offset, one.nbytes))
    data = bytearray((path / "model.bin").read_bytes())
    data[last.offset] ^= 1
    (path / "model.bin").write_bytes(data)
    stored = PartReader(path, "model", manifest).tensors()
    values(stored[first.name])
    with pytest.raises(CheckpointError, match=r"is torn: model\.bin: chunk \d+ of \d+ does not have its checksum"):
        values(stored[last.name])
    (path / "model.bin").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"is torn: model\.bin: it has \d+ bytes, not"):
        PartReader(path, "model", manifest)


def test_a_saved_model_is_read_one_by_one(tmp_path: Path) -> None:
    model, path = state().model, tmp_path / "model.safetensors"
    save_tensors(path, model)
    found = {name: values(tensor) for name, tensor in ModelReader(path).tensors().items()}
    assert digest(found) == digest(model)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="was changed since it was written"):
        ModelReader(path)
    for damaged in (data[:-1], data[:100], b"", b"\xff" * 20):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
            ModelReader(path)
