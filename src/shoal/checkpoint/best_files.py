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

from shoal.checkpoint.model_stream import LENGTH_BYTES, TensorStream, save_stream
from shoal.observe.checkpoint_names import folder_name, step_folders, step_of
from shoal.observe.disk import writing
from shoal.observe.run_folder import RunFolder

_SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class BestModel:
    """One of them."""

    step: int
    path: Path
    digest: str
    results: Mapping[str, float]
    """Of its evaluation."""
    attempt: str
    """Which attempt at the run has kept it."""


class BestFiles:
    """Those of one run, as one attempt at it sees them: its own, and those that were there where it began.

    Others are of a past that was given up, and are removed.
    """

    def __init__(self, folder: RunFolder, *, begun_at: int = 0, attempt: str = "") -> None:
        self._run = folder
        self._begun_at = begun_at
        self._attempt = attempt

    @property
    def shown(self) -> Path:
        """Where people look for the best."""
        return self._run.best_model

    def newest(self, limit: float = math.inf) -> BestModel | None:
        """The best of those up to this step; None where none was kept."""
        return max((one for one in self._all() if one.step <= limit), key=lambda one: one.step, default=None)

    def has(self, step: int) -> bool:
        """Whether the model after this step was kept."""
        return any(one.step == step for one in self._all())

    def keep(self, step: int, stream: TensorStream, results: Mapping[str, float]) -> None:
        """Keep this model, and show it."""
        with writing(self._run.path):
            self._run.best.mkdir(exist_ok=True)
        path, told = self._run.best / f"{folder_name(step)}{_SUFFIX}", json.dumps(dict(results))
        save_stream(path, stream, steps=str(step), results=told, attempt=self._attempt)
        self.settle()

    def settle(self) -> None:
        """Show the newest, and let go of those that nobody can come back to."""
        if not self._run.best.is_dir():
            return
        saved = [step_of(path) or 0 for path in step_folders(self._run.checkpoints)]
        wanted = {one.path for limit in (math.inf, *saved) if (one := self.newest(limit)) is not None}
        newest = self.newest()
        with writing(self._run.path):
            for path in self._run.best.iterdir():
                if path not in wanted:
                    path.unlink(missing_ok=True)
            if newest is None:
                self.shown.unlink(missing_ok=True)
            else:
                put(newest.path, self.shown)

    def _all(self) -> list[BestModel]:
        if not self._run.best.is_dir():
            return []
        found = (_read(path) for path in self._run.best.glob(f"*{_SUFFIX}"))
        return [one for one in found if one is not None and self._counts(one)]

    def _counts(self, one: BestModel) -> bool:
        return one.step <= self._begun_at or one.attempt == self._attempt


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


def _read(path: Path) -> BestModel | None:
    """What its header says of it; None where it is none that we wrote."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            told = json.loads(file.read(length))["__metadata__"]
        return BestModel(
            step=int(told["steps"]),
            path=path,
            digest=told["digest"],
            results=json.loads(told["results"]),
            attempt=told["attempt"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
