"""Writing under a run folder: whole files or none, and a sentence where the disk refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import LaunchError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what the disk refuses while writing under `folder` into a sentence that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise LaunchError(
                f"Run folder {folder}: the disk is full ({error.strerror}); free some space there, "
                "or put the run on another disk."
            ) from error
        if error.errno in _REFUSED:
            raise LaunchError(
                f"Run folder {folder}: it cannot be written ({error.strerror}); make it writable, "
                "or put the run in another folder."
            ) from error
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash half-way, finds the old text or the new, never a part."""
    part = path.with_name(f".{path.name}.part")
    with writing(path.parent):
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
