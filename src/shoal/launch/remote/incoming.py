"""The run folder of a supervisor whose hosts have others: their files come in, and count when they are here."""

from __future__ import annotations

import shutil
from pathlib import Path

from shoal.checkpoint.freeing import Shelf
from shoal.comm.host_words import FileGone, FilePiece, LogPiece
from shoal.launch.remote.pieces import Arrivals
from shoal.observe.disk import explain_refusal
from shoal.observe.happenings import CheckpointWritten, Saved, Warned
from shoal.observe.run_folder import RunFolder
from shoal.spec import Job
from shoal.spec.checkpointing import CheckpointRule
from shoal.spec.told import Told


class IncomingFiles:
    """What one host sends of what its processes leave behind."""

    def __init__(self, job: Job) -> None:
        self._arrivals = Arrivals(Path(job.run_dir))
        self._shelf = Shelf(RunFolder(Path(job.run_dir)).checkpoints)
        self._keep = CheckpointRule.parse(job.checkpoint).keep
        self._refusal = ""
        """Why the disk did not take all of what comes now."""

    def take(self, word: FilePiece | LogPiece | FileGone) -> None:
        """A part of a file, or the end of one."""
        try:
            match word:
                case FilePiece():
                    self._arrivals.take(word)
                case LogPiece():
                    self._arrivals.extend(word)
                case FileGone():
                    _remove(self._arrivals.inside(word.name))
        except OSError as error:
            if not isinstance(word, LogPiece):
                self._refusal = explain_refusal(error)

    def confirm(self, word: Told) -> Told:
        """What is true here of what a process tells: where the disk has not taken a file, that is told instead."""
        if not isinstance(word, CheckpointWritten | Saved):
            return word
        if self._refusal:
            text, self._refusal = f"{word.path} could not be kept here: {self._refusal}", ""
            return Warned(text=text)
        if isinstance(word, CheckpointWritten):
            older = [path for path in self._shelf.oldest_first() if path != Path(word.path)]
            for path in older[: max(0, len(older) + 1 - self._keep)]:
                self._shelf.remove(path)
        return word


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
