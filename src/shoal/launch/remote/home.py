"""A folder on a host for what its supervisor sends there: of mode 0700, and gone when the run is over."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from shoal.comm.host_words import FilePiece, FilesLacking, FilesOffered, HostWelcomed
from shoal.comm.socket_folder import SocketFolder
from shoal.launch.remote.luggage_names import CODE
from shoal.launch.remote.outgoing import OutgoingFiles
from shoal.launch.remote.pieces import KEPT, Arrivals
from shoal.launch.remote.sources import lacking
from shoal.observe.checkpoint_names import MANIFEST, step_folders
from shoal.observe.run_folder import RunFolder
from shoal.spec import Job
from shoal.spec.checkpointing import CheckpointRule

_PREFIX = "shoal-host-"
_PATHS = ("resume", "from", "input")
"""Options of a job that name files."""


class HostHome:
    """What lies on this host for one run, where it has no disk in common with its supervisor's."""

    def __init__(self) -> None:
        self._folder: SocketFolder | None = None
        self._arrivals: Arrivals | None = None
        self.outgoing: OutgoingFiles | None = None
        """What its processes leave behind, where the run folder is not on a disk of this host's."""
        self.is_orphaned = False
        """Whether the supervisor may be gone for good, with its disk."""
        self._job: Job | None = None
        """As it is at the supervisor's, where that disk is not this host's, too."""
        self._moved: dict[str, str] = {}
        self._left_behind: Path | None = None

    @property
    def path(self) -> Path:
        """The folder, which is made when it is first needed."""
        if self._folder is None:
            self._folder = SocketFolder(_PREFIX)
            self._arrivals = Arrivals(Path(self._folder.path))
        return Path(self._folder.path)

    def compare(self, offer: FilesOffered) -> FilesLacking:
        """What of this is not here."""
        return FilesLacking(
            names=lacking(Path(offer.root), offer.files),
            lacks_mark=bool(offer.mark) and not os.path.exists(offer.mark),
        )

    def take(self, piece: FilePiece) -> None:
        """A part of a file has come."""
        assert self.path and self._arrivals is not None
        self._arrivals.take(piece)
        if piece.is_last and piece.name.startswith(KEPT) and piece.name.endswith(MANIFEST):
            keep = 1 if self._job is None else CheckpointRule.parse(self._job.checkpoint).keep
            for older in step_folders(self.path / KEPT)[:-keep]:
                shutil.rmtree(older, ignore_errors=True)

    def settle(self, welcome: HostWelcomed) -> Job:
        """The job as it is here: its paths lead to what was sent. This process goes where the supervisor is."""
        job = Job.from_json(welcome.job)
        if not welcome.moved:
            with suppress(OSError):  # Where this host has no such folder, processes are where the agent is.
                os.chdir(welcome.folder)
            return job
        moved = {there: str(self.path / here) for there, here in welcome.moved.items()}
        for folder in (welcome.folder, _moved(welcome.folder, moved), str(self.path)):
            try:
                os.chdir(folder)
                break
            except OSError:
                continue
        path, colon, factory = job.target.partition(":")
        if path.endswith(".py"):
            path = _moved(path, moved)
        else:
            sys.path[:0] = [here for here in moved.values() if os.path.isdir(here)]
        options = {name: _moved(value, moved) if name in _PATHS else value for name, value in job.options.items()}
        if job.run_dir:
            os.makedirs(run_dir := _moved(job.run_dir, moved), exist_ok=True)
            if job.run_dir in moved:
                self.outgoing = OutgoingFiles(Path(run_dir), job.run_dir)
                self._job, self._moved = job, moved
            job = replace(job, run_dir=run_dir)
        return replace(job, target=f"{path}{colon}{factory}", options=options)

    def close(self) -> None:
        """Remove it. Where the supervisor may be gone with its disk, what it takes to go on is left behind."""
        if self.is_orphaned and self._job is not None:
            with suppress(OSError):  # There is no room for it, or no right to it.
                self._leave_behind(self._job)
        if self._folder is not None:
            self._folder.close()

    def come_back(self) -> None:
        """The supervisor was there all the time: nobody needs what was left behind."""
        if self._left_behind is not None:
            shutil.rmtree(self._left_behind, ignore_errors=True)

    def _leave_behind(self, job: Job) -> None:
        """Let checkpoints lie on this host's disk where the run folder was on the supervisor's, and the task, too:
        so that the run can be resumed from here by its name."""
        own, there = RunFolder(Path(_moved(job.run_dir, self._moved))), RunFolder(Path(job.run_dir))
        found = [*step_folders(own.checkpoints), *step_folders(self.path / KEPT)]
        whole = [path for path in found if (path / MANIFEST).is_file()]
        if not whole or not own.job.is_file() or there.path.exists():
            return
        there.checkpoints.mkdir(parents=True)
        self._left_behind = there.path
        for path in whole:
            shutil.move(path, there.checkpoints / path.name)
        for root, here in self._moved.items():
            if Path(here).name == CODE:
                _add_lacking(Path(here), Path(root))
        shutil.copy(own.job, there.job)


def _add_lacking(source: Path, target: Path) -> None:
    """Copy files that are not there; those that are, stay as they are."""
    for path in source.rglob("*"):
        name = target / path.relative_to(source)
        if path.is_file() and "__pycache__" not in path.parts and not name.exists():
            name.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, name)


def _moved(path: str, moved: Mapping[str, str]) -> str:
    """Where a path of the supervisor's host leads here."""
    for there, here in moved.items():
        if path == there or path.startswith(there.rstrip("/") + "/"):
            return here + path[len(there.rstrip("/")) :]
    return path
