"""A run's checkpoints: each a folder that is there as a whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from shoal.checkpoint.folder import CHUNK_BYTES, read_folder, sync_folder, write_folder
from shoal.checkpoint.listing import Entry, entry_of, list_entries
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.room import Room
from shoal.checkpoint.snapshot import PackedSnapshot, Snapshot
from shoal.checkpoint.streamed import StreamedFolder, StreamedState
from shoal.checkpoint.wholeness import newest_whole
from shoal.observe.checkpoint_names import folder_name, step_folders
from shoal.observe.disk import writing

__all__ = ["CheckpointStore", "Entry"]


class CheckpointStore:
    """The folder `checkpoints` of a run. One process writes at a time; anybody may read."""

    def __init__(self, folder: Path, *, keep: int = 3, chunk_bytes: int = CHUNK_BYTES) -> None:
        """`keep`: checkpoints that stay; those saved longest ago are removed."""
        self.folder = folder
        self._keep = keep
        self._chunk_bytes = chunk_bytes

    def save(self, snapshot: Snapshot) -> Entry:
        """Write a checkpoint, which appears at once and whole; then remove those that are too many."""
        packed = snapshot if isinstance(snapshot, PackedSnapshot) else snapshot.copy_into(Room())
        stage = self._hidden(snapshot.step)
        with writing(self.folder):
            self._prepare()
            try:
                manifest = write_folder(stage, packed, chunk_bytes=self._chunk_bytes)
            except BaseException:
                shutil.rmtree(stage, ignore_errors=True)
                raise
            return self._show(stage, manifest)

    def take(self, state: StreamedState) -> StreamedFolder:
        """Write a state while it comes; it is a checkpoint after `finish`."""
        folder = StreamedFolder(self._hidden(state.step), state.step, chunk_bytes=self._chunk_bytes)
        folder.attempt(self._prepare)
        folder.take(state)
        return folder

    def finish(self, folder: StreamedFolder) -> Entry:
        """Make it appear, whole; then remove those that are too many."""
        with writing(self.folder):
            return self._show(folder.path, folder.finish())

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()

    def _show(self, stage: Path, manifest: Manifest) -> Entry:
        """Give what is whole its name."""
        path = self.folder / folder_name(manifest.step)
        self._remove(path)
        stage.rename(path)
        sync_folder(self.folder)
        self._prune(newest=path)
        return entry_of(path, manifest)

    def entries(self) -> list[Entry]:
        """Those that have a manifest, by step."""
        return list_entries(self.folder)

    def load(self, entry: Entry) -> PackedSnapshot:
        """Read a checkpoint and check every chunk; a `CheckpointError` names what is torn."""
        return read_folder(entry.path)

    def latest(self, report: Callable[[str], None]) -> PackedSnapshot | None:
        """The whole one of the highest step; `report` is told of those that were torn and skipped."""
        return newest_whole(self.folder, read_folder, report)

    def _prune(self, newest: Path) -> None:
        """By age, not by step: a run that was resumed at an earlier step may save below what it left behind."""
        older = [path for path in step_folders(self.folder) if path != newest]
        older.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in older[self._keep - 1 :]:
            self._remove(path)
        self._sweep()

    def _remove(self, path: Path) -> None:
        """First its name, at once, then its files: half a checkpoint must never look like one."""
        if path.exists():
            path.rename(path.with_name(f".{path.name}.old"))

    def _sweep(self) -> None:
        """What was removed, or left by a process that was killed while it saved."""
        for path in self.folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _hidden(self, step: int) -> Path:
        return self.folder / f".{folder_name(step)}.part"
