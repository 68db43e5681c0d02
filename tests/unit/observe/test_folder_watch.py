"""A run whose folder is taken away is ended; one that cannot be looked at is not."""

import errno
import os
import shutil

import pytest

from shoal.errors import DiskRefused
from shoal.observe import Event, FolderWatch


class Clock:
    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.fixture
def watched(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    watch = FolderWatch(folder, Clock())
    watch.handle(Event.of("beat"))
    return folder, watch


def test_a_removed_folder_ends_the_run_once(watched):
    folder, watch = watched
    folder.rmdir()
    with pytest.raises(DiskRefused, match=f"Run folder {folder} was removed or replaced"):
        watch.handle(Event.of("beat"))
    watch.handle(Event.of("failed", values={"message": "it failed", "traceback": ""}))
    watch.close()


def test_another_folder_of_that_name_is_not_the_same(watched):
    folder, watch = watched
    folder.rename(folder.with_name("moved"))
    folder.mkdir()
    with pytest.raises(DiskRefused, match="removed or replaced"):
        watch.handle(Event.of("steps", values={"steps": []}))


def test_a_parent_that_is_gone_counts(watched):
    folder, watch = watched
    shutil.rmtree(folder.parent)
    with pytest.raises(DiskRefused, match="removed or replaced"):
        watch.handle(Event.of("steps", values={"steps": []}))


def test_a_disk_that_cannot_answer_ends_nothing(watched, monkeypatch):
    _, watch = watched

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("os.stat", fail)
    watch.handle(Event.of("beat"))
