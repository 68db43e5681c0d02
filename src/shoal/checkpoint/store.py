"""A run's checkpoints: each a folder that is there as a whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shoal.checkpoint.block import file_bytes
from shoal.checkpoint.folder import CHUNK_BYTES, read_folder, sync_folder, write_folder
from shoal.checkpoint.freeing import Shelf
from shoal.checkpoint.listing import Entry, entry_of, list_entries
from shoal.checkpoint.manifest import Location, Manifest
from shoal.checkpoint.snapshot import PackedSnapshot, Room, Snapshot
from shoal.checkpoint.streamed import StreamedFolder, StreamedState, lay_out_stream
from shoal.checkpoint.wholeness import newest_whole
from shoal.observe.checkpoint_names import folder_name
from shoal.observe.disk import explain_refusal, is_full, writing


class CheckpointStore:
    """The folder `checkpoints` of a run. One process writes at a time; anybody may read."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        chunk_bytes: int = CHUNK_BYTES,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`keep`: checkpoints that stay; those saved longest ago are removed, sooner where the disk is short.

        `report` is told of those that had to go sooner.
        """
        self.folder = folder
        self.shelf = Shelf(folder, report)
        self._report = report
        self._keep = keep
        self._chunk_bytes = chunk_bytes

    def save(self, snapshot: Snapshot) -> Entry:
        """Write a checkpoint, which appears at once and whole; then remove those that are too many."""
        packed = snapshot if isinstance(snapshot, PackedSnapshot) else snapshot.copy_into(Room())
        with writing(self.folder):
            self._prepare()
            self._make_room({part: block.locations for part, block in packed.blocks.items()})
            while True:
                try:
                    return self._write(packed)
                except OSError as error:
                    # What the system said about free space is no promise.
                    if not (is_full(error) and self.shelf.free_one()):
                        raise

    def _write(self, packed: PackedSnapshot) -> Entry:
        draft = self._hidden(packed.step)
        try:
            manifest = write_folder(draft, packed, chunk_bytes=self._chunk_bytes)
            return self._show(draft, manifest)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def take(self, state: StreamedState) -> StreamedFolder:
        """Write a state while it comes; it is a checkpoint after `finish`."""
        folder = StreamedFolder(self._hidden(state.step), state.step, chunk_bytes=self._chunk_bytes)
        folder.attempt(self._prepare)
        folder.attempt(self._make_room, {part: lay_out_stream(stream) for part, stream in state.parts()})
        folder.take(state)
        return folder

    def finish(self, folder: StreamedFolder) -> Entry:
        """Make it appear, whole; then remove those that are too many."""
        with writing(self.folder):
            return self._show(folder.path, folder.finish())

    def _prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()

    def _make_room(self, locations: Mapping[str, Sequence[Location]]) -> None:
        """For these, and for the model's file that the run is to end with."""
        model = sum(location.nbytes for location in locations["model"])
        self.shelf.make_room(model + sum(file_bytes(own) for own in locations.values()))

    def _show(self, draft: Path, manifest: Manifest) -> Entry:
        """Give what is whole its name."""
        path = self.folder / folder_name(manifest.step)
        before = path.with_name(f".{path.name}.old")
        if path.exists():
            path.rename(before)
        try:
            draft.rename(path)
        except OSError:
            if before.exists():
                before.rename(path)
            raise
        sync_folder(self.folder)
        try:
            self._prune(newest=path)
        except OSError as error:
            # This one is saved all the same; the next save tries again.
            self._report(f"older checkpoints could not be removed: {explain_refusal(error)}")
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
        older = [path for path in self.shelf.oldest_first() if path != newest]
        for path in older[: max(0, len(older) + 1 - self._keep)]:
            self.shelf.remove(path)
        self._sweep()

    def _sweep(self) -> None:
        """What was removed, or left by a process that was killed while it saved."""
        for path in self.folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _hidden(self, step: int) -> Path:
        return self.folder / f".{folder_name(step)}.part"
