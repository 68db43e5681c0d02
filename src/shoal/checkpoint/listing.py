"""Which checkpoints there are, without reading their data. Quick: nothing here imports torch."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from shoal.checkpoint.fields import Malformed
from shoal.checkpoint.manifest import Manifest, parse_manifest
from shoal.errors import CheckpointError
from shoal.observe.checkpoint_names import MANIFEST, is_checkpoint, step_folders, step_of

MOST_MANIFEST_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One checkpoint, as far as its manifest tells."""

    step: int
    path: Path
    digest: str
    """Names the whole model, as `digest` does for a saved one."""
    nbytes: int
    """Of all tensors; tied ones count once."""
    saved_at: float
    """Seconds since 1970."""
    seconds: float
    """What writing its data took."""
    problem: str = ""
    """Why its manifest cannot be used; empty where it can."""


def list_entries(folder: Path) -> list[Entry]:
    """Those that have a manifest, by step."""
    entries = [_read_entry(path) for path in step_folders(folder) if is_checkpoint(path)]
    # A run that goes on may have removed one meanwhile.
    return [entry for entry in entries if not entry.problem or is_checkpoint(entry.path)]


def entry_of(path: Path, manifest: Manifest) -> Entry:
    """What is told about a checkpoint that has this manifest."""
    return Entry(
        step=manifest.step,
        path=path,
        digest=manifest.digest,
        nbytes=manifest.nbytes,
        saved_at=manifest.saved_at,
        seconds=manifest.seconds,
    )


def read_manifest(path: Path) -> Manifest:
    """A checkpoint's manifest, without its data."""
    try:
        with open_inside(path / MANIFEST) as file:
            if os.fstat(file.fileno()).st_size > MOST_MANIFEST_BYTES:
                raise Malformed("it is too long")
            manifest = parse_manifest(file.read())
        if step_of(path) not in (None, manifest.step):
            raise Malformed(f"it is that of step {manifest.step}")
    except (OSError, Malformed) as error:
        raise torn(path, MANIFEST, error) from None
    return manifest


def open_inside(path: Path) -> BufferedReader:
    """A plain file in the folder itself: no link that leads elsewhere, no pipe that never ends."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Malformed("it is not a plain file")
    return open(fd, "rb")


def torn(path: Path, where: str, error: Exception) -> CheckpointError:
    """The error for a checkpoint that is not whole."""
    missing = isinstance(error, FileNotFoundError)
    reason = "it is missing" if missing else getattr(error, "strerror", None) or str(error)
    return CheckpointError(f"Checkpoint {path} is torn: {where}: {reason}; use an earlier one.")


def _read_entry(path: Path) -> Entry:
    try:
        return entry_of(path, read_manifest(path))
    except CheckpointError as error:
        step = step_of(path) or 0
        return Entry(step=step, path=path, digest="", nbytes=0, saved_at=0.0, seconds=0.0, problem=str(error))
