"""The sources of a job's task: which files they are, and by which digests hosts that have them know them."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import xxhash

from shoal.observe.wording import plural

IGNORE_FILE = ".shoalignore"
"""Patterns of what stays where it is, a line each, beside the task's file or at the top of its package."""
MOST_FILE_BYTES = 1 << 20
"""Of a file that is no source: larger ones are data, which has to be where the task reads it."""
MOST_BYTES = 64 << 20
MOST_FILES = 10_000
_NAMED_FILES = 3


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Files under a folder, by their paths there."""

    root: Path
    files: dict[str, str] = field(default_factory=dict)
    """By path: the file's digest."""
    nbytes: int = 0
    objection: str = ""
    """Why they cannot travel, in a sentence; `files` then has the task's own alone."""

    @property
    def digest(self) -> str:
        """One name for all of them."""
        return xxhash.xxh3_128(repr(sorted(self.files.items())).encode()).hexdigest()


def sources_of(target: str) -> Sources | None:
    """What a task is made of: its file's folder, or the package that it belongs to. None where it is installed."""
    path = _file_of(target.partition(":")[0])
    if path is None:
        return None
    base = path.parent
    while (base / "__init__.py").is_file() and (base.parent / "__init__.py").is_file():
        base = base.parent
    root, own = base.parent, path.relative_to(base.parent).as_posix()
    files, nbytes = {own: path.stat().st_size}, path.stat().st_size
    for found in _walk(base):
        name = found.relative_to(root).as_posix()
        if name not in files:
            files[name] = found.stat().st_size
            nbytes += files[name]
        if nbytes > MOST_BYTES or len(files) > MOST_FILES:
            return Sources(root=root, files=digests(root, [own]), objection=_objection(base, files))
    return Sources(root=root, files=digests(root, files), nbytes=nbytes)


def lacking(sources_root: Path, files: dict[str, str]) -> list[str]:
    """Those of these files that are not here, or are others here."""
    return [name for name, digest in files.items() if _digest(sources_root / name) != digest]


def digests(root: Path, names: list[str] | dict[str, int]) -> dict[str, str]:
    """Of these files, as far as they can be read."""
    found = {name: _digest(root / name) for name in sorted(names)}
    return {name: digest for name, digest in found.items() if digest is not None}


def _digest(path: Path) -> str | None:
    try:
        return xxhash.xxh3_128(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _file_of(name: str) -> Path | None:
    """The file of a task, or of the package that its module is in; None where that came with Python or by pip."""
    if name.endswith(".py"):
        path = Path(name).absolute()
        return path if path.is_file() else None
    try:
        found = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return None
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        return None
    installed = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]
    path = Path(found.origin).absolute()
    is_installed = any(folder in path.parents for folder in installed) or "site-packages" in path.parts
    return None if is_installed else path


def _walk(base: Path) -> Iterator[Path]:
    """Sources, and data that is small; nothing that a run, an editor or a package manager has left there."""
    ignored = _patterns(base)
    for folder, folders, names in os.walk(base):
        here = Path(folder)
        folders[:] = sorted(
            name for name in folders if not _is_left_out(here / name, base, ignored) and not _is_made(here / name)
        )
        for name in sorted(names):
            path = here / name
            if name.startswith(".") or _is_left_out(path, base, ignored) or not path.is_file():
                continue
            if name.endswith(".py") or path.stat().st_size <= MOST_FILE_BYTES:
                yield path


def _is_made(folder: Path) -> bool:
    is_run = (folder / "job.json").is_file() or (folder / "events.jsonl").is_file()
    is_environment = (folder / "pyvenv.cfg").is_file()
    return folder.name.startswith(".") or folder.name == "__pycache__" or is_run or is_environment


def _patterns(base: Path) -> list[str]:
    try:
        lines = (base / IGNORE_FILE).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line.strip().rstrip("/") for line in lines if line.strip() and not line.startswith("#")]


def _is_left_out(path: Path, base: Path, patterns: list[str]) -> bool:
    written = path.relative_to(base).as_posix()
    return any(fnmatchcase(written, one) or fnmatchcase(path.name, one) for one in patterns)


def _objection(base: Path, sizes: dict[str, int]) -> str:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_NAMED_FILES]
    named = ", ".join(f"{name} ({sizes[name] / 1e6:.1f} MB)" for name in largest)
    return (
        f"The task's folder {base} is to be sent to hosts that lack it, but has more than "
        f"{plural(MOST_FILES, 'file')} or {MOST_BYTES >> 20} MiB; the largest are {named}. Name what is not "
        f"needed there in {base / IGNORE_FILE}, or put the task into a folder of its own."
    )
