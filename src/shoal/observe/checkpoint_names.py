"""What checkpoints are called, and which one a user means."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shoal.errors import SpecError
from shoal.observe.run_folder import DEFAULT_ROOT, RunFolder

MANIFEST = "manifest.json"
"""The file that makes a folder a checkpoint."""


def folder_name(step: int) -> str:
    """The name of a checkpoint's folder."""
    return f"step-{step:09d}"


def step_of(path: Path) -> int | None:
    """The step that a folder's name tells; None where it is no checkpoint's name."""
    found = re.fullmatch(r"step-(\d{9,18})", path.name, re.ASCII)
    return int(found[1]) if found else None


def step_folders(folder: Path) -> list[Path]:
    """The checkpoints in a folder by step, whole or not."""
    if not folder.is_dir():
        return []
    steps = {step: path for path in folder.iterdir() if (step := step_of(path)) is not None}
    return [steps[step] for step in sorted(steps)]


def is_checkpoint(path: Path) -> bool:
    """Whether this folder counts as a checkpoint; that it is whole, only reading it tells."""
    return os.path.exists(path / MANIFEST)  # False also for a name that no file can have


def names_checkpoint(text: str) -> bool:
    """Whether this names one checkpoint, by its folder or as `RUN@STEP`, and not a run."""
    run, _, step = text.rpartition("@")
    return is_checkpoint(Path(text)) or bool(run and step.isascii() and step.isdecimal())


def find_run(text: str, root: Path | str = DEFAULT_ROOT) -> RunFolder:
    """The run that this names, or a checkpoint of which it names."""
    if is_checkpoint(Path(text)):
        return RunFolder.open(Path(text).absolute().parent.parent)
    return RunFolder.open(text.rpartition("@")[0] if names_checkpoint(text) else text, root)


def find_checkpoint(text: str, root: Path | str = DEFAULT_ROOT) -> Path:
    """A checkpoint's folder, from its path, from `RUN@STEP`, or from `RUN` for its latest."""
    if is_checkpoint(Path(text)):
        return Path(text).absolute()
    run, _, step = text.rpartition("@") if names_checkpoint(text) else (text, "", "")
    folder = RunFolder.open(run, root)
    known = [path for path in step_folders(folder.checkpoints) if is_checkpoint(path)]
    if not known:
        raise SpecError(f"Run {folder.name!r} has no checkpoints in {folder.path}; train with --checkpoint.")
    if not step:
        return known[-1]
    for path in known:
        if step_of(path) == int(step):
            return path
    steps = ", ".join(str(step_of(path)) for path in known)
    raise SpecError(f"Run {folder.name!r} has no checkpoint of step {step}; there are those of steps {steps}.")
