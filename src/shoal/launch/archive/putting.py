"""Puts a run's folder at a URL while it trains, in a thread: training waits for nothing of it.

A checkpoint is there when its manifest is, which goes last. What the store refuses is told once, tried again, and
named at the end.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from shoal.launch.archive.store import UrlFolder
from shoal.launch.remote.sources import sources_of
from shoal.observe import Event, RunFolder
from shoal.observe.checkpoint_names import MANIFEST, folder_name, is_checkpoint, step_folders, step_of
from shoal.observe.happenings import CheckpointWritten, Happening, LineSaid, Saved, Warned
from shoal.spec import Job

LOOK_EVERY_S = 30.0
RETRY_S = 5.0
GIVE_UP_S = 60.0
"""How long, at the end of a run, a store may refuse or say nothing."""
TASK_FILE = "task.json"


class Archive:
    """A sink: what it is told of is put there soon."""

    def __init__(self, folder: RunFolder, job: Job, tell: Callable[[Happening], None]) -> None:
        """`tell` is called where events are handled alone."""
        self._folder = folder
        self._job = job
        self._tell = tell
        self._store = UrlFolder(f"{str(job.options['archive']).rstrip('/')}/{folder.name}")
        self._put: dict[str, tuple[int, int]] = {}
        """By name: size and time of the file as it was put there last."""
        self._steps: set[int] = set()
        """Checkpoints that are there."""
        self._has_task = False
        self._texts: deque[Happening] = deque()
        self._failure = ""
        self._is_ending = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="shoal-archive", daemon=True)
        self._thread.start()

    # For whoever watches the run.

    def handle(self, event: Event) -> None:
        """Something has happened."""
        while self._texts:
            self._tell(self._texts.popleft())
        if isinstance(event.what, CheckpointWritten | Saved):
            self._wake.set()

    def close(self) -> None:
        """Nothing more happens; `finish` waits for what is left."""

    def finish(self) -> str:
        """Wait until all is there; what is not, and why, in a sentence."""
        self._is_ending = True
        self._store.heard_at = time.monotonic()
        self._wake.set()
        while self._thread.is_alive() and time.monotonic() < self._store.heard_at + GIVE_UP_S:
            self._thread.join(0.1)
        lacking = [name for name, file in self._files() if self._is_new(name, file)]
        steps = [f"the checkpoint of step {step_of(path)}" for path in self._new_checkpoints()]
        if not (lacking or steps):
            return ""
        why = self._failure or f"the store said nothing for {GIVE_UP_S:.0f} s"
        return f"{self._store.url} lacks {', '.join([*steps, *lacking])} ({why})."

    # In the thread.

    def _work(self) -> None:
        tries_until = None
        while True:
            self._wake.clear()
            is_last = self._is_ending
            try:
                self._put_all()
                if self._failure and not is_last:
                    self._texts.append(
                        LineSaid(text=f"the archive {self._store.url} takes what it is given again")
                    )
                self._failure = ""
            except OSError as error:
                if not self._failure:
                    text = f"the archive {self._store.url} refuses what it is given, and is tried again: {error}"
                    self._texts.append(Warned(text=text))
                self._failure = str(error) or type(error).__name__
            if is_last:
                tries_until = tries_until or time.monotonic() + GIVE_UP_S
                if not self._failure or time.monotonic() > tries_until:
                    return
            self._wake.wait(RETRY_S if self._failure else LOOK_EVERY_S)

    def _put_all(self) -> None:
        """What is to be there and is not, or has changed: what belongs to a checkpoint before it."""
        self._put_task()
        if self._is_new(self._folder.job.name, self._folder.job):
            self._put_file(self._folder.job.name, self._folder.job)
        for checkpoint in self._new_checkpoints():
            self._put_checkpoint(checkpoint)
        for name, file in self._files():
            if self._is_new(name, file):
                self._put_file(name, file)
        here = {step_of(path) for path in step_folders(self._folder.checkpoints)}
        for step in [one for one in self._steps if one not in here] if here else ():
            self._store.remove(f"checkpoints/{folder_name(step)}/{MANIFEST}")  # From here on it is none.
            self._store.remove(f"checkpoints/{folder_name(step)}")
            self._steps.remove(step)

    def _put_task(self) -> None:
        """What the run's code is, for a machine that lacks it."""
        if self._has_task:
            return
        sources = sources_of(self._job.target)
        path, _, factory = self._job.target.partition(":")
        if sources is not None and not sources.objection and path.endswith(".py"):
            for name in sources.files:
                self._store.put(f"task/{name}", sources.root / name)
            own = Path(path).absolute().relative_to(sources.root).as_posix()
            with TemporaryDirectory(prefix="shoal-") as scratch:
                told = Path(scratch) / TASK_FILE
                told.write_text(json.dumps({"target": f"{own}:{factory}" if factory else own}), encoding="utf-8")
                self._store.put(TASK_FILE, told)
        self._has_task = True

    def _new_checkpoints(self) -> list[Path]:
        whole = [path for path in step_folders(self._folder.checkpoints) if is_checkpoint(path)]
        return [path for path in whole if step_of(path) not in self._steps]

    def _put_checkpoint(self, path: Path) -> None:
        try:
            told = (path / MANIFEST).read_bytes()
            if self._store.read(f"checkpoints/{path.name}/{MANIFEST}") != told:  # An earlier attempt may have.
                self._store.remove(f"checkpoints/{path.name}/{MANIFEST}")
                for file in sorted(path.iterdir(), key=lambda one: one.name == MANIFEST):
                    self._store.put(f"checkpoints/{path.name}/{file.name}", file)
        except FileNotFoundError:
            if path.is_dir():
                raise
            self._store.remove(f"checkpoints/{path.name}")  # Others have taken its place meanwhile.
            return
        step = step_of(path)
        assert step is not None, "only those are listed"
        self._steps.add(step)

    def _put_file(self, name: str, file: Path) -> None:
        with suppress(FileNotFoundError):  # It may be gone again.
            status = file.stat()
            self._store.put(name, file)
            self._put[name] = (status.st_size, status.st_mtime_ns)

    def _is_new(self, name: str, file: Path) -> bool:
        try:
            status = file.stat()
        except FileNotFoundError:
            return False
        return self._put.get(name) != (status.st_size, status.st_mtime_ns)

    def _files(self) -> Iterator[tuple[str, Path]]:
        """All besides checkpoints; by name and not whatever there is, for a key may lie among it."""
        folder = self._folder
        models = (folder.model, folder.partial_model, folder.best_model, folder.average_model)
        for file in (folder.job, folder.events, folder.result, folder.report, folder.chart, folder.told, *models):
            if file.is_file():
                yield file.name, file
        for inner in (folder.logs, folder.images, folder.best, folder.logged):
            for file in sorted(inner.rglob("*")) if inner.is_dir() else ():
                if file.is_file():
                    yield file.relative_to(folder.path).as_posix(), file
