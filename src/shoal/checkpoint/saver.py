"""Saves in the background while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shoal.checkpoint.snapshot import Room, Snapshot
from shoal.checkpoint.store import CheckpointStore, Entry

THREAD_NAME = "shoal-checkpoint"


class BackgroundSaver:
    """One thread, at most one save in flight. Copies first, so that training may change the tensors at once.

    An offer that comes while a save is in flight waits for it: no checkpoint that was due is left out, and one
    copy is all the memory that it takes.
    """

    def __init__(
        self,
        store: CheckpointStore,
        on_saved: Callable[[Entry, float], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """`on_saved` gets the entry and the seconds that training stood still; both are called in the thread."""
        self.seconds = 0.0
        """What the last save took in the background; 0 before the first."""
        self._store = store
        self._on_saved = on_saved
        self._on_failed = on_failed
        self._room = Room()
        self._saving: threading.Thread | None = None

    def offer(self, snapshot: Snapshot) -> float:
        """Copy the snapshot and have it saved; returns the seconds that this call took."""
        begin = time.perf_counter()
        self.close()
        copy = snapshot.copy_into(self._room)
        stall_s = time.perf_counter() - begin
        self._saving = threading.Thread(target=self._save, args=(copy, stall_s), name=THREAD_NAME, daemon=True)
        self._saving.start()
        return time.perf_counter() - begin

    def close(self) -> None:
        """Wait for the save in flight, if there is one."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None

    def _save(self, copy: Snapshot, stall_s: float) -> None:
        begin = time.perf_counter()
        try:
            entry = self._store.save(copy)
        except Exception as error:
            # Training must not end because a disk is full, and nobody else would see this thread's error.
            self._on_failed(f"step {copy.step} was not saved: {error or type(error).__name__}")
            return
        self.seconds = time.perf_counter() - begin
        self._on_saved(entry, stall_s)
