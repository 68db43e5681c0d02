"""A folder on a host for what its supervisor sends there: of mode 0700, and gone when the run is over."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from shoal.comm.host_words import FilePiece, FilesLacking, FilesOffered, HostWelcomed
from shoal.comm.socket_folder import SocketFolder
from shoal.launch.remote.outgoing import OutgoingFiles
from shoal.launch.remote.pieces import Arrivals
from shoal.launch.remote.sources import lacking
from shoal.spec import Job

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
            job = replace(job, run_dir=run_dir)
        return replace(job, target=f"{path}{colon}{factory}", options=options)

    def close(self) -> None:
        """Remove it."""
        if self._folder is not None:
            self._folder.close()


def _moved(path: str, moved: Mapping[str, str]) -> str:
    """Where a path of the supervisor's host leads here."""
    for there, here in moved.items():
        if path == there or path.startswith(there.rstrip("/") + "/"):
            return here + path[len(there.rstrip("/")) :]
    return path
