"""`runs/<name>/`: everything that a run leaves behind."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from shoal.errors import SpecError
from shoal.observe.disk import write_whole, writing
from shoal.observe.jsonl import FILE_NAME
from shoal.observe.strict_json import to_json
from shoal.spec import Job

DEFAULT_ROOT = "runs"
PARTIAL_MODEL = "model.partial.safetensors"
BEST_MODEL = "best.safetensors"
AVERAGE_MODEL = "average.safetensors"
_LONGEST_NAME = 200
"""Of a run, in bytes; file systems take 255, and other names are made from it."""
_LONGEST_STEM = 40
"""Letters of what a run is called by itself, before the time."""


class _Inside:
    """A path in a run's folder, by the name of what lies there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """One run's folder and the paths in it."""

    path: Path
    job = _Inside("job.json")
    """What was asked for."""
    events = _Inside(FILE_NAME)
    """What happened."""
    result = _Inside("result.json")
    """What came out, in numbers."""
    report = _Inside("report.md")
    """All of it, to read."""
    chart = _Inside("loss.png")
    """The report's picture."""
    model = _Inside("model.safetensors")
    """The trained model."""
    partial_model = _Inside(PARTIAL_MODEL)
    """The model of a run that has not come to its end, or failed: never what was asked for."""
    average_model = _Inside(AVERAGE_MODEL)
    """The average of the parameters over steps, where the task or its optimizer keeps one."""
    best_model = _Inside(BEST_MODEL)
    """The best model that was evaluated, where the task keeps it."""
    best = _Inside("best")
    """It, and those that were the best when checkpoints were saved, by step."""
    checkpoints = _Inside("checkpoints")
    """What training can go on from."""
    decisions = _Inside("coordinator.sqlite")
    """What a coordinator must not forget."""
    journal = _Inside("supervisor.journal")
    """What another supervisor needs to go on with a run whose own is gone; a key is in it."""
    logs = _Inside("logs")
    """What each process printed."""
    images = _Inside("images")
    """What callbacks have logged as images."""
    told = _Inside("callbacks.marks")
    """What callbacks were told, where the task has any."""
    unsent = _Inside("callbacks.unsent")
    """What they have logged, on its way into the events."""
    logged = _Inside("logged")
    """What loggers keep here, in a folder each."""

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @classmethod
    def create(
        cls,
        root: Path | str = DEFAULT_ROOT,
        name: str | None = None,
        overwrite: bool = False,
        *,
        target: str = "run",
    ) -> RunFolder:
        """A folder for a new run; without a name it is called after `target` and the time.

        With `overwrite` it may be an earlier run's: `clear` it once nobody else works in it.
        """
        root = Path(root).absolute()
        try:
            with writing(root):
                root.mkdir(parents=True, exist_ok=True)
            return cls(_make_unique(root, target) if name is None else _make_named(root, name, overwrite))
        except FileExistsError:
            raise SpecError(f"Runs folder {root} is a file, not a folder; name another one.") from None

    @classmethod
    def open(cls, path_or_name: Path | str, root: Path | str = DEFAULT_ROOT) -> RunFolder:
        """The folder of an earlier run, by its path or by its name under `root`."""
        try:
            for path in (Path(path_or_name), Path(root) / path_or_name):
                if (folder := cls(path.absolute())).job.is_file():
                    return folder
            known = sorted(job.parent.name for job in Path(root).glob("*/job.json"))
        except OSError as error:
            raise SpecError(
                f"Run {str(path_or_name)!r} cannot be looked for in {root} ({error.strerror}); name another."
            ) from None
        found = f"the runs there are: {', '.join(known)}" if known else "there are no runs yet"
        raise SpecError(f"Run {str(path_or_name)!r} is not a run's path, nor its name under {root}; {found}.")

    def write_job(self, job: Job) -> None:
        """Record what was asked for."""
        write_whole(self.job, job.to_json() + "\n")

    def read_job(self) -> Job:
        """What was asked for."""
        return Job.from_json(_read(self.job))

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Record what came out."""
        write_whole(self.result, to_json(dict(result), indent=2) + "\n")

    def read_result(self) -> dict[str, Any]:
        """What came out."""
        try:
            values: dict[str, Any] = json.loads(_read(self.result))
        except json.JSONDecodeError as error:
            raise SpecError(f"{self.result}: this is not a result written by Shoal ({error}).") from None
        return values

    def explain_no_model(self) -> str:
        """Why there is no model, in a sentence, and what there is."""
        if not self.partial_model.is_file():
            return f"Run {self.name!r} has left no model in {self.path}; it failed before it could save one."
        return (
            f"Run {self.name!r} has not come to its end, and its model is a partial one; name a checkpoint, "
            f"RUN@STEP, or that file itself, {self.partial_model}, if you want it."
        )

    def demote_model(self, which: os.stat_result | None = None) -> None:
        """The model that is there is not the one that the run is to end with: let nobody take it for that.

        With `which` only that file is meant: another may have taken its place meanwhile.
        """
        with writing(self.path):
            if self.model.is_file():
                self.model.replace(self.partial_model)
                if which is not None and not os.path.samestat(which, self.partial_model.stat()):
                    self.partial_model.replace(self.model)

    def drop_partial_model(self) -> None:
        """Where there is a model that the run ended with, no other is wanted."""
        with writing(self.path):
            if self.model.is_file():
                self.partial_model.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove what a run leaves behind, and nothing that someone else put here."""
        with writing(self.path):
            told = (self.job, self.events, self.result, self.report, self.chart)
            models = (self.model, self.partial_model, self.best_model, self.average_model)
            for file in (*told, *models, self.decisions, self.told, self.unsent, self.journal):
                file.unlink(missing_ok=True)
            for folder in (self.logs, self.logged, self.images, self.best, self.checkpoints):
                if folder.is_dir():
                    shutil.rmtree(folder)


def _make_named(root: Path, name: str, overwrite: bool) -> Path:
    if name in ("", ".", "..") or Path(name).name != name or not name.isprintable():
        raise SpecError(f"Run name {name!r} must be one plain folder name, without '/', line breaks and the like.")
    if (length := len(name.encode())) > _LONGEST_NAME:
        raise SpecError(f"Run name {name[:20]!r}… is {length} bytes long; use one of at most {_LONGEST_NAME}.")
    path = root / name
    with writing(path):
        try:
            path.mkdir()
        except FileExistsError:
            if not overwrite or not path.is_dir():
                raise SpecError(
                    f"Run {name!r} is there already, in {path}; choose another name, or say overwrite."
                ) from None
    return path


def _make_unique(root: Path, target: str) -> Path:
    """Two runs may start in one second; making the folder decides who gets the name."""
    module = target.partition(":")[0].removesuffix(".py")
    stem = re.sub(r"[^\w-]+", "-", re.split(r"[/.]", module)[-1]).strip("-")[:_LONGEST_STEM] or "run"
    name = f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    for attempt in count(1):
        path = root / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            with writing(path):
                path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("count never ends")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"Run folder {path.parent}: there is no {path.name}; the run did not get there.") from None
