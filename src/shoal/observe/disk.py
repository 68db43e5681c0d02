"""Writing under a run folder: whole files or none, and a sentence where the disk refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import DiskRefused

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BROKEN = (errno.EIO, errno.EUCLEAN, errno.EREMOTEIO, errno.ENXIO, errno.ENODEV)
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what the disk refuses while writing under `folder` into a sentence that says what to do.

    That something is there already is no refusal: whoever makes it knows what that means. Nor is what others do
    from whom the data comes.
    """
    try:
        yield
    except (FileExistsError, ConnectionError, TimeoutError):
        raise
    except OSError as error:
        if error.errno is None:
            raise
        text = f"Run folder {folder}: {explain_refusal(error)}; {_words(error)[1]}."
        raise DiskRefused(text, is_full=is_full(error)) from error


def is_full(error: OSError) -> bool:
    """Whether it would help to free some space."""
    return error.errno in _FULL


def explain_refusal(error: OSError) -> str:
    """What the disk says, in a few words: `the disk is full (No space left on device)`."""
    return f"{_words(error)[0]} ({error.strerror or error})"


def _words(error: OSError) -> tuple[str, str]:
    """What is wrong, and what to do."""
    if error.errno in _FULL:
        return "the disk is full", "free some space there, or put the run on another disk"
    if error.errno in _BROKEN:
        return "the disk fails", "check it, or put the run on another disk"
    if error.errno in _GONE:
        return "it is not there, or no folder", "put the run in a folder that stays"
    return "it cannot be written", "make it writable, or put the run in another folder"


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file so that a reader, or a crash half-way, finds the old one or the new, never a part."""
    part = path.with_name(f".{path.name}.part")
    with writing(path.parent):
        try:
            with part.open("wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError:
            _discard(part)
            raise


def mend_last_line(fd: int) -> None:
    """Where a crash has cut the last line off, take away what is left of it: the next would be glued to it."""
    end = os.fstat(fd).st_size
    begin, tail = end, b""
    while begin > 0 and b"\n" not in tail:
        begin, before = max(0, begin - 65536), begin
        tail = os.pread(fd, before - begin, begin) + tail
    if torn := len(tail.rpartition(b"\n")[2]):
        os.ftruncate(fd, end - torn)


def _discard(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # Why the write failed is what counts.
