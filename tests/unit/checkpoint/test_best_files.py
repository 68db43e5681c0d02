"""Of the best models those stay that somebody can come back to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shoal.checkpoint.best_files import BestFiles, put
from shoal.checkpoint.model_file import load_tensors
from shoal.checkpoint.model_stream import save_tensors
from shoal.errors import CheckpointError
from shoal.observe import RunFolder


class Kept:
    """A run's folder, and what is kept in it."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.files = BestFiles(self.folder)

    def keep(self, step: int) -> str:
        self.folder.best.mkdir(exist_ok=True)
        values = {"weight": torch.full((2,), float(step))}
        results = json.dumps({"loss": 1 / step})
        digest = save_tensors(self.files.path_of(step), values, steps=str(step), results=results)
        self.files.settle()
        return digest

    def save(self, step: int) -> None:
        (self.folder.checkpoints / f"step-{step:09d}").mkdir(parents=True)

    @property
    def steps(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("step-")) for path in self.folder.best.iterdir())

    @property
    def shown(self) -> float:
        return float(load_tensors(self.folder.best_model)["weight"][0])


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def test_the_newest_is_shown_and_others_go(kept: Kept) -> None:
    assert kept.files.newest() is None
    kept.keep(3)
    digest = kept.keep(7)
    assert kept.steps == [7] and kept.shown == 7
    newest = kept.files.newest()
    assert newest is not None
    assert (newest.step, newest.digest, newest.results) == (7, digest, {"loss": 1 / 7})
    assert not list(kept.folder.path.glob(".*")), "nothing half done is left"


def test_what_was_the_best_at_a_checkpoint_stays_with_it(kept: Kept) -> None:
    kept.keep(3)
    kept.save(5)
    for step in (7, 9):
        kept.keep(step)
    assert kept.steps == [3, 9] and kept.shown == 9
    best_then = kept.files.newest(limit=5)
    assert best_then is not None and best_then.step == 3
    kept.files.forget_after(5)
    assert kept.steps == [3] and kept.shown == 3
    kept.files.forget_after(2)
    assert kept.steps == [] and not kept.folder.best_model.exists() and kept.files.newest() is None


def test_a_run_that_keeps_none_is_left_alone(kept: Kept) -> None:
    kept.files.forget_after(0)
    assert not list(kept.folder.path.iterdir())


def test_another_name_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    first, second, target = (tmp_path / name for name in ("a", "b", "c"))
    first.write_text("one")
    second.write_text("two")
    for source in (first, second, second):
        put(source, target)
        assert target.read_text() == source.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_a_torn_file_is_named(kept: Kept) -> None:
    kept.keep(3)
    kept.files.path_of(3).write_bytes(b"\x05\0\0\0\0\0\0\0{}")
    with pytest.raises(CheckpointError, match=r"step-000000003\.safetensors is not a whole model"):
        kept.files.newest()
