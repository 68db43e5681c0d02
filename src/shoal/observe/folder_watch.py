"""Notices that the folder of a run is gone while the run goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from shoal.errors import DiskRefused
from shoal.observe.events import Event

LOOK_EVERY_S = 1.0


class FolderWatch:
    """A sink that ends the run once its folder was removed or replaced: nothing that it makes could be kept there.

    It looks when something is told, and beats are told all the time.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._identity = self._look()
        self._looked_at = clock()
        self._has_told = False

    def handle(self, event: Event) -> None:
        """Look, if that was not done a moment ago."""
        if self._has_told or self._clock() - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = self._clock()
        try:
            is_gone = self._look() != self._identity
        except (FileNotFoundError, NotADirectoryError):
            is_gone = True
        except OSError:
            is_gone = False  # It cannot be told now; who writes will see.
        if is_gone:
            self._has_told = True
            raise DiskRefused(
                f"Run folder {self._folder} was removed or replaced while the run went on, so nothing it makes "
                "could be kept, and it was ended; start it anew in a folder that stays."
            )

    def close(self) -> None: ...

    def _look(self) -> tuple[int, int]:
        found = os.stat(self._folder)
        return found.st_dev, found.st_ino
