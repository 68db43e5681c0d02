"""What goes with a job to hosts that do not have it: the task's sources, and the files that it begins from."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.comm.host_words import FilesLacking, FilesOffered
from shoal.errors import LaunchError
from shoal.launch.remote.luggage_names import CODE, FROM, RUN
from shoal.launch.remote.pieces import cut
from shoal.launch.remote.remote_host import RemoteHost
from shoal.launch.remote.sources import Sources, digests, sources_of
from shoal.observe.checkpoint_names import MANIFEST
from shoal.observe.disk import writing
from shoal.observe.run_folder import RunFolder
from shoal.observe.wording import plural
from shoal.spec import Job

_COMPARE_S = 60.0


@dataclass(frozen=True)
class Equipped:
    """A host that has all that a job needs."""

    host: RemoteHost
    moved: dict[str, str]
    """By path here: where that is in the host's own folder."""


def equip(hosts: Sequence[RemoteHost], job: Job, tell: Callable[[str], None], *, least: int) -> list[Equipped]:
    """Send these hosts all that they lack; those that could keep it. LaunchError where they are fewer than
    `least`. `tell` takes a line for the user."""
    luggage, found = Luggage(job), []
    mark = _Mark(job.run_dir)
    try:
        for left, host in zip(range(len(hosts) - 1, -1, -1), hosts, strict=True):
            try:
                found.append(Equipped(host, luggage.give(host, mark.path, tell)))
            except HostUnequipped as error:
                if len(found) + left < least:
                    raise
                tell(f"{error} The run goes on without it.")
    finally:
        mark.remove()
    return found


class HostUnequipped(LaunchError):
    """A host cannot have what a job needs: its disk is full, say."""


class _Mark:
    """A file in the run folder, by which a host knows that it is the same folder there."""

    def __init__(self, run_dir: str) -> None:
        self.path = ""
        if run_dir:
            self.path = os.path.join(run_dir, f".here-{secrets.token_hex(8)}")
            with writing(Path(run_dir)), open(self.path, "wb"):
                pass

    def remove(self) -> None:
        if self.path:
            with suppress(OSError):
                os.unlink(self.path)


class Luggage:
    """What a job needs besides what is installed."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sources = sources_of(job.target) or Sources(root=Path("/"))

    def give(self, host: RemoteHost, mark: str, tell: Callable[[str], None]) -> dict[str, str]:
        """Send what a host lacks; by path here: where that is in the host's own folder."""
        sources = self._sources
        answer = host.ask(
            FilesOffered(root=str(sources.root), files=sources.files, mark=mark), FilesLacking, _COMPARE_S
        )
        if answer is None:
            raise self._objection(host)
        moved: dict[str, str] = {}
        if answer.names:
            self._send_code(host, tell)
            moved[str(sources.root)] = CODE
        if answer.lacks_mark:
            # In this order: a checkpoint may lie in the run folder, and that in the task's.
            moved = {**self._send_beginning(host), self._job.run_dir: RUN, **moved}
            if (written := RunFolder(Path(self._job.run_dir)).job).is_file():
                self._send(host, written, f"{RUN}/{written.name}")
        if not self._job.run_dir:  # nothing says whether its disk is this one's
            moved = {**self._send_what_is_read(host), **moved}
        moved = moved if any(there != here for there, here in moved.items()) else {}
        if moved:
            # It answers in order: by then it has kept everything, or said that it cannot.
            answer = host.ask(FilesOffered(root="/", files={}, mark=""), FilesLacking, _COMPARE_S)
            if answer is None or host.trouble:
                raise self._objection(host)
        return moved

    @staticmethod
    def _objection(host: RemoteHost) -> HostUnequipped:
        why = host.trouble or "it did not say which files it has; see what it does"
        return HostUnequipped(f"Host {host.facts.name} ({host.facts.address}) cannot take part: {why}.")

    def _send_what_is_read(self, host: RemoteHost) -> dict[str, str]:
        """A model, and new data for it, where the host does not have the same."""
        moved = {}
        for option in ("from", "input"):
            path = Path(self._job.options.get(option) or "")
            if not path.is_absolute():
                continue
            files = [path.name] if path.is_file() else [f"{path.name}/{one.name}" for one in path.iterdir()]
            offer = FilesOffered(root=str(path.parent), files=digests(path.parent, files), mark="")
            answer = host.ask(offer, FilesLacking, _COMPARE_S)
            if answer is not None and not answer.names:
                moved[str(path)] = str(path)  # also where the task's folder, which it may lie in, is not there
                continue
            moved[str(path)] = f"{FROM}/{option}/{path.name}"
            for name in files:
                self._send(host, path.parent / name, f"{FROM}/{option}/{name}")
        return moved

    def _send_code(self, host: RemoteHost, tell: Callable[[str], None]) -> None:
        sources = self._sources
        if sources.objection:
            raise LaunchError(sources.objection)
        tell(
            f"sending the task to {host.facts.name}: {plural(len(sources.files), 'file')}, "
            f"{sources.nbytes / 1e3:,.0f} kB, digest {sources.digest[:8]}"
        )
        for name in sources.files:
            self._send(host, sources.root / name, f"{CODE}/{name}")

    def _send_beginning(self, host: RemoteHost) -> dict[str, str]:
        """The checkpoint, or the model, that the job begins from."""
        moved = {}
        for option in ("resume", "from"):
            if not (written := self._job.options.get(option)):
                continue
            path = Path(written)
            moved[written] = here = f"{FROM}/{path.name}"
            if not path.is_dir():
                self._send(host, path, here)
                continue
            # The manifest makes a folder a checkpoint: it comes last.
            for file in sorted(path.iterdir(), key=lambda one: one.name == MANIFEST):
                self._send(host, file, f"{here}/{file.name}")
        if moved and (best := RunFolder(Path(self._job.run_dir)).best).is_dir():
            for file in best.iterdir():  # which the run may come back to
                self._send(host, file, f"{RUN}/{best.name}/{file.name}")
        return moved

    def _send(self, host: RemoteHost, path: Path, name: str) -> None:
        try:
            for piece in cut(path.open("rb"), name):
                host.send_piece(piece)
        except OSError as error:
            raise LaunchError(f"{path} cannot be sent to {host.facts.name} ({error.strerror}).") from None
