"""Checkpoints: whole on disk, all bits back, only the newest kept."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from helpers.checkpoint_states import assert_same, state
from shoal.checkpoint.folder import CHUNK_BYTES, load_model, write_folder
from shoal.checkpoint.freeing import ASIDE_BYTES
from shoal.checkpoint.model_file import digest
from shoal.checkpoint.model_stream import save_tensors
from shoal.checkpoint.snapshot import Snapshot
from shoal.checkpoint.store import CheckpointStore
from shoal.errors import CheckpointError, LaunchError
from shoal.spec import Job

CHUNKS = [CHUNK_BYTES, 4096, 1000]
"""The last is none that a disk takes past the page cache."""


def steps(store):
    return [entry.step for entry in store.entries()]


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_what_is_saved_is_what_is_loaded(tmp_path, chunk_bytes):
    store = CheckpointStore(tmp_path / "checkpoints", chunk_bytes=chunk_bytes)
    entry = store.save(state())
    assert entry.path == tmp_path / "checkpoints" / "step-000000200"
    assert entry.digest == digest(state().model)
    assert store.entries() == [entry]
    assert_same(store.load(entry), state())
    assert_same(store.latest(pytest.fail), state())
    assert os.listdir(store.folder) == ["step-000000200"]


def test_a_state_of_nothing_but_its_step(tmp_path):
    nothing = Snapshot(
        step=0, model={}, optimizer={}, losses=torch.empty(0, dtype=torch.float64), rng={}, facts={}
    )
    store = CheckpointStore(tmp_path)
    assert store.save(nothing).nbytes == 0
    assert_same(store.latest(pytest.fail), nothing)
    assert os.listdir(tmp_path / "step-000000000") == ["manifest.json"]


def test_tied_weights_are_kept_once_and_come_back_tied(tmp_path):
    tied = torch.randn(1000)
    snapshot = Snapshot(
        step=1,
        model={"head": tied, "tokens": tied, "own": tied.clone()},
        optimizer={},
        losses=torch.zeros(1, dtype=torch.float64),
        rng={},
        facts={},
    )
    store = CheckpointStore(tmp_path)
    entry = store.save(snapshot)
    assert entry.nbytes == 2 * tied.nbytes + 8
    found = store.load(entry).model
    assert found["head"].data_ptr() == found["tokens"].data_ptr() != found["own"].data_ptr()
    assert all(torch.equal(tensor, tied) for tensor in found.values())


def test_the_manifest_is_json_and_names_every_tensor(tmp_path):
    entry = CheckpointStore(tmp_path).save(state())
    manifest = json.loads((entry.path / "manifest.json").read_text())["manifest"]
    places = {part: {place["name"] for place in file["places"]} for part, file in manifest["files"].items()}
    assert places == {part: set(tensors) for part, tensors in state().parts()}
    assert all(place["offset"] % 64 == 0 for file in manifest["files"].values() for place in file["places"])


def test_the_latest_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20, 30, 40):
        store.save(state(step))
    assert steps(store) == [30, 40]
    assert sorted(os.listdir(tmp_path)) == ["step-000000030", "step-000000040"]


def test_what_was_saved_last_is_kept_though_its_step_is_lower(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for step in (10, 20, 30, 25):
        store.save(state(step))
    assert steps(store) == [25, 30]


def test_a_step_that_is_saved_again_is_replaced(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(state(10, width=50))
    store.save(state(10, width=60))
    assert_same(store.latest(pytest.fail), state(10, width=60))
    assert os.listdir(tmp_path) == ["step-000000010"]


def test_leftovers_of_a_killed_process_are_no_checkpoint_and_go_with_the_next(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(state(10))
    (tmp_path / ".step-000000020.part").mkdir()
    (tmp_path / ".step-000000020.part" / "model.bin").write_bytes(b"half")
    assert steps(store) == [10]
    store.save(state(20))
    assert sorted(os.listdir(tmp_path)) == ["step-000000010", "step-000000020"]


def test_a_full_disk_leaves_the_one_before_and_nothing_else(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(state(10))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, hard))
    try:
        with pytest.raises(LaunchError, match="the disk is full"):
            store.save(state(20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["step-000000010"]
    assert_same(store.latest(pytest.fail), state(10))


class Disk:
    """Says that so many bytes are free; what is removed is added, what is written taken off."""

    def __init__(self, monkeypatch, folder, size):
        self._folder, self._size = folder, size
        monkeypatch.setattr("shoal.checkpoint.freeing.os.statvfs", self.statvfs)

    def statvfs(self, path):
        used = sum(file.stat().st_blocks * 512 for file in self._folder.rglob("*") if file.is_file())
        return SimpleNamespace(f_bavail=max(0, self._size - used), f_frsize=1)


def size_of(folder):
    return sum(file.stat().st_blocks * 512 for file in folder.iterdir())


@pytest.fixture
def three(tmp_path):
    """A store with three checkpoints, what it reported, and what one of them takes."""
    told = []
    store = CheckpointStore(tmp_path, keep=3, report=told.append)
    for step in (10, 20, 30):
        store.save(state(step))
    return store, told, size_of(tmp_path / "step-000000030")


def test_where_the_disk_is_short_the_oldest_go_first(three, monkeypatch):
    store, told, size = three
    Disk(monkeypatch, store.folder, 3 * size + ASIDE_BYTES)
    store.save(state(40))
    assert steps(store) == [30, 40]
    assert told == [f"the checkpoint of step {step} was removed to make room on the disk" for step in (10, 20)]


def test_the_newest_whole_one_stays_whatever_comes(three, monkeypatch):
    store, told, size = three
    (store.folder / "step-000000030" / "model.bin").write_bytes(b"torn")
    Disk(monkeypatch, store.folder, 3 * size + ASIDE_BYTES)
    with pytest.raises(LaunchError, match="the disk is full"):
        store.save(state(40, width=2000))
    assert steps(store) == [10, 20, 30] and not told, "nothing goes where that would not help"
    for _ in range(5):
        store.shelf.free_one()
    assert steps(store) == [20], "torn ones are missed least"


def test_room_for_the_final_model_stays(three, monkeypatch):
    store, _, size = three
    model = sum(tensor.nbytes for tensor in state(40).model.values())
    Disk(monkeypatch, store.folder, 3 * size + ASIDE_BYTES + model // 2)
    store.save(state(40))
    assert steps(store) == [30, 40], "a third one would fit, but not beside the model"


def test_what_turns_out_not_to_fit_is_tried_again_with_more_room(three, monkeypatch):
    store, told, _ = three
    refusals = iter([errno.ENOSPC])

    def write(stage, packed, **words):
        for code in refusals:
            stage.mkdir()
            raise OSError(code, os.strerror(code))
        return write_folder(stage, packed, **words)

    monkeypatch.setattr("shoal.checkpoint.store.write_folder", write)
    store.save(state(40))
    assert steps(store) == [20, 30, 40] and len(told) == 1


def test_one_that_cannot_be_removed_does_not_make_a_new_one_unsaved(three, monkeypatch):
    store, told, _ = three
    rename = Path.rename

    def fail(path, target):
        if target.name.endswith(".old"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    with monkeypatch.context() as disk:
        disk.setattr(Path, "rename", fail)
        assert store.save(state(40)).step == 40
    assert steps(store) == [10, 20, 30, 40] and "older checkpoints could not be removed" in told[0]
    store.save(state(50))
    assert steps(store) == [30, 40, 50]


def test_a_step_that_cannot_be_replaced_stays_as_it_was(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.save(state(10, width=50))
    rename = Path.rename

    def fail(path, target):
        if path.name.endswith(".part"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(LaunchError, match="the disk fails"):
        store.save(state(10, width=60))
    assert_same(store.latest(pytest.fail), state(10, width=50))


def test_what_no_checkpoint_can_hold_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="facts must be plain JSON data"):
        store.save(state(facts={"job": Job(target="digits.py")}))
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(CheckpointError, match=r"'odd' has dtype float32 and layout torch.sparse_coo"):
        store.save(Snapshot(step=1, model={"odd": sparse}, optimizer={}, losses=sparse, rng={}, facts={}))
    assert store.entries() == [] and store.latest(pytest.fail) is None


def test_a_checkpoint_is_a_saved_model_too(tmp_path):
    module, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    entry = CheckpointStore(tmp_path).save(
        Snapshot(step=1, model=module.state_dict(), optimizer={}, losses=torch.zeros(1), rng={}, facts={})
    )
    load_model(entry.path, twin)
    assert digest(twin.state_dict()) == entry.digest == save_tensors(tmp_path / "m.safetensors", twin.state_dict())
    with pytest.raises(CheckpointError, match="does not fit the task's model"):
        load_model(entry.path, nn.Linear(4, 2))
