"""Saves in the background while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from shoal.checkpoint.listing import Entry
from shoal.checkpoint.snapshot import Room, Snapshot
from shoal.checkpoint.store import CheckpointStore
from shoal.checkpoint.streamed import StreamedState

THREAD_NAME = "shoal-checkpoint"


class BackgroundSaver:
    """One thread, at most one save in flight.

    A whole state is copied first, so that training may change the tensors at once. One that comes tensor by tensor
    is written while it comes, as nobody may have room for a copy; only waiting for the disk is left to the thread.
    What comes while a save is in flight waits for it: no checkpoint that was due is left out, and one copy is all
    the memory that it takes.
    """

    def __init__(
        self,
        store: CheckpointStore,
        on_saved: Callable[[Entry, float], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """`on_saved` gets the entry and the seconds that training stood still; both are called in the thread."""
        self.seconds = 0.0
        """What the last save took, but for copying; 0 before the first."""
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
        self._go_on(partial(self._store.save, copy), copy.step, begin, time.perf_counter())
        return time.perf_counter() - begin

    def take(self, state: StreamedState) -> float:
        """Write the state as it comes and have it made whole; returns the seconds that this call took."""
        begin = time.perf_counter()
        self.close()
        folder = self._store.take(state)
        self._go_on(partial(self._store.finish, folder), state.step, begin, begin)
        return time.perf_counter() - begin

    def close(self) -> None:
        """Wait for the save in flight, if there is one."""
        if self._saving is not None:
            self._saving.join()
            self._saving = None

    def _go_on(self, save: Callable[[], Entry], step: int, stood_since: float, saving_since: float) -> None:
        """Let training go on, and save meanwhile."""
        stall_s = time.perf_counter() - stood_since

        def run() -> None:
            try:
                entry = save()
            except Exception as error:
                # Training must not end because a disk is full, and nobody else would see this thread's error.
                self._on_failed(f"step {step} was not saved: {error or type(error).__name__}")
                return
            self.seconds = time.perf_counter() - saving_since
            self._on_saved(entry, stall_s)

        self._saving = threading.Thread(target=run, name=THREAD_NAME, daemon=True)
        self._saving.start()
