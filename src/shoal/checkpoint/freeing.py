"""Room on a disk that is short of it: older checkpoints go first, the newest whole one never."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from shoal.checkpoint.wholeness import check_folder
from shoal.errors import CheckpointError
from shoal.observe.checkpoint_names import step_folders, step_of

ASIDE_BYTES = 256 << 10
"""What a run writes besides tensors: manifest, events, result, report."""

_BLOCK_BYTES = 512
"""What `st_blocks` counts, whatever the file system's own blocks are."""


class Shelf:
    """The folder of a run's checkpoints as something to take old ones from."""

    def __init__(self, folder: Path, report: Callable[[str], None] = lambda text: None) -> None:
        """`report` is told which ones had to go."""
        self._folder = folder
        self._report = report
        self._whole: Path | None = None
        """The last one that was found whole: reading it again would tell nothing new."""

    def oldest_first(self) -> list[Path]:
        """By age, not by step: a run that was resumed at an earlier step may save below what it left behind."""
        return sorted(step_folders(self._folder), key=lambda path: path.stat().st_mtime_ns)

    def remove(self, path: Path) -> None:
        """First its name, at once, then its files: half a checkpoint must never look like one."""
        hidden = path.with_name(f".{path.name}.old")
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def make_room(self, nbytes: int) -> None:
        """See that so much can be written, and the small things besides; `OSError` where that cannot be."""
        lacking = nbytes + ASIDE_BYTES - self._free_bytes()
        if lacking > 0 and sum(map(_size, self._dispensable())) < lacking:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        while self._free_bytes() < nbytes + ASIDE_BYTES and self.free_one():
            pass

    def free_one(self) -> bool:
        """Remove what can be missed most; whether there was any."""
        for path in self._dispensable():
            self._report(f"the checkpoint of step {step_of(path)} was removed to make room on the disk")
            self.remove(path)
            return True
        return False

    def _dispensable(self) -> list[Path]:
        """All but the newest whole one: those that are torn, then the oldest first."""
        older, torn = self.oldest_first(), []
        while older and not self._is_whole(newest := older.pop()):
            torn.append(newest)
        return torn + older

    def _is_whole(self, path: Path) -> bool:
        if path != self._whole:
            try:
                check_folder(path)
            except CheckpointError:
                return False
            self._whole = path
        return True

    def _free_bytes(self) -> int:
        # The folder may not be there yet; its disk is that of what is.
        where = next(path for path in (self._folder, *self._folder.parents) if path.exists())
        found = os.statvfs(where)
        return found.f_bavail * found.f_frsize


def _size(folder: Path) -> int:
    return sum(file.stat().st_blocks * _BLOCK_BYTES for file in folder.iterdir())
