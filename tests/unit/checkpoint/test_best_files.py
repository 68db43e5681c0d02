"""Of the best models those stay that somebody can come back to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.checkpoint.best_files import BestFiles, put
from shoal.checkpoint.model_file import load_tensors
from shoal.checkpoint.model_stream import TensorStream
from shoal.observe import RunFolder


class Kept:
    """A run's folder, and what is kept in it."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.files = BestFiles(self.folder, attempt="one")

    def keep(self, *steps: int) -> None:
        for step in steps:
            stream = TensorStream.of({"weight": torch.full((2,), float(step))})
            self.files.keep(step, stream, {"loss": 1 / step})

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
    kept.keep(3, 7)
    assert kept.steps == [7] and kept.shown == 7 and kept.files.has(7) and not kept.files.has(3)
    newest = kept.files.newest()
    assert newest is not None and (newest.step, newest.results) == (7, {"loss": 1 / 7})
    assert not list(kept.folder.path.glob(".*")), "nothing half done is left"


def test_what_was_the_best_at_a_checkpoint_stays_with_it(kept: Kept) -> None:
    kept.keep(3)
    kept.save(5)
    kept.keep(7, 9)
    assert kept.steps == [3, 9] and kept.shown == 9
    best_then = kept.files.newest(limit=5)
    assert best_then is not None and best_then.step == 3


def test_who_goes_on_from_a_checkpoint_knows_what_was_the_best_then(kept: Kept) -> None:
    kept.keep(3)
    kept.save(5)
    kept.keep(7)
    kept.files = BestFiles(kept.folder, begun_at=5, attempt="two")
    newest = kept.files.newest()
    assert newest is not None and newest.step == 3 and not kept.files.has(7)
    assert kept.steps == [3, 7] and kept.shown == 7, "who only looks changes nothing"
    kept.files.settle()
    assert kept.steps == [3] and kept.shown == 3
    kept.keep(8)
    assert kept.steps == [3, 8] and kept.shown == 8


def test_where_none_is_left_none_is_shown(kept: Kept) -> None:
    kept.files.settle()
    assert not list(kept.folder.path.iterdir()), "a run that keeps none is left alone"
    kept.keep(3)
    BestFiles(kept.folder, begun_at=2, attempt="two").settle()
    assert kept.steps == [] and not kept.folder.best_model.exists()


def test_what_is_torn_does_not_count(kept: Kept) -> None:
    kept.keep(3)
    (path,) = kept.folder.best.iterdir()
    path.write_bytes(b"\x05\0\0\0\0\0\0\0{}")
    assert kept.files.newest() is None and not kept.files.has(3)
    kept.keep(3)
    assert kept.shown == 3


def test_another_name_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    first, second, target = (tmp_path / name for name in ("a", "b", "c"))
    first.write_text("one")
    second.write_text("two")
    for source in (first, second, second):
        put(source, target)
        assert target.read_text() == source.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
