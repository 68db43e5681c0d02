"""The best models that a run has evaluated: `best/step-….safetensors`, and the newest as `best.safetensors`.

Each was better than all before it. So the newest up to a step was the best then, and a run that goes on from a
checkpoint finds what was the best when that was saved: others than these are not kept.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import CheckpointError
from shoal.observe.checkpoint_names import folder_name, step_folders, step_of
from shoal.observe.disk import writing
from shoal.observe.run_folder import RunFolder

_SUFFIX = ".safetensors"
_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class BestModel:
    """One of them."""

    step: int
    path: Path
    digest: str
    results: Mapping[str, float]
    """Of its evaluation."""


class BestFiles:
    """Those of one run."""

    def __init__(self, folder: RunFolder) -> None:
        self._run = folder

    @property
    def shown(self) -> Path:
        """Where people look for the best."""
        return self._run.best_model

    def path_of(self, step: int) -> Path:
        """Where the model after this step lies, if it was the best."""
        return self._run.best / f"{folder_name(step)}{_SUFFIX}"

    def newest(self, limit: float = math.inf) -> BestModel | None:
        """The best of those up to this step; None where none was kept."""
        steps = [step for step in self._steps() if step <= limit]
        return _read(steps[-1], self.path_of(steps[-1])) if steps else None

    def settle(self) -> None:
        """Show the newest, and let go of those that nobody can come back to."""
        steps = self._steps()
        saved = [step_of(path) or 0 for path in step_folders(self._run.checkpoints)]
        wanted = {_last(steps, limit) for limit in (math.inf, *saved)}
        with writing(self._run.path):
            for step in steps:
                if step not in wanted:
                    self.path_of(step).unlink(missing_ok=True)
            if steps:
                put(self.path_of(steps[-1]), self.shown)
            else:
                self.shown.unlink(missing_ok=True)

    def forget_after(self, step: int) -> None:
        """The run goes on after this step: what came later is void."""
        if not self._run.best.is_dir():
            return
        with writing(self._run.path):
            for later in [each for each in self._steps() if each > step]:
                self.path_of(later).unlink(missing_ok=True)
        self.settle()

    def _steps(self) -> list[int]:
        if not self._run.best.is_dir():
            return []
        files = self._run.best.iterdir()
        found = (step_of(file.with_suffix("")) for file in files if file.suffix == _SUFFIX)
        return sorted(step for step in found if step is not None)


def put(source: Path, target: Path) -> None:
    """Let a file, which nobody writes into any more, have another name as well; in the place of what is there."""
    part = target.with_name(f".{target.name}.part")
    with writing(target.parent):
        part.unlink(missing_ok=True)
        try:
            os.link(source, part)
        except OSError:  # not every file system can
            shutil.copyfile(source, part)
        part.replace(target)
        part.unlink(missing_ok=True)  # it stays where both names were one file already


def _last(steps: list[int], limit: float) -> int | None:
    return max((step for step in steps if step <= limit), default=None)


def _read(step: int, path: Path) -> BestModel:
    """What its header says of it."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            told = json.loads(file.read(length))["__metadata__"]
        return BestModel(step=step, path=path, digest=told["digest"], results=json.loads(told["results"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a whole model that a run kept as its best ({error}).") from None
