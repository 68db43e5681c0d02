"""What a supervisor's machine was told, in a file: since it does no I/O, whoever tells another machine the same
has one that stands where it stood.

The file is this user's alone (0600): it names the run's hosts, and has the run's key. Beats and steps are left
out, which decide nothing that is not told besides; so it grows with what changes, not with time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import msgpack

from shoal.comm.words import FROM_PROCESSES, Garbled
from shoal.errors import LaunchError, ShoalError
from shoal.launch import messages
from shoal.observe.disk import writing
from shoal.observe.happenings import Heartbeat, StepsTaken
from shoal.spec import Job, World
from shoal.spec.host_facts import HostFacts
from shoal.spec.told import Told, by_kind, read_message

_WORDS = {**FROM_PROCESSES, **by_kind(Garbled)}
_KINDS: dict[str, type[Any]] = {
    name: kind for name, kind in vars(messages).items() if isinstance(kind, type) and is_dataclass(kind)
} | {"World": World, "HostFacts": HostFacts}
_KIND = "~"
_NOISE = (Heartbeat, StepsTaken)


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """One thing in a journal, in the order in which it happened."""

    what: str
    """`begin`, `take`, `act`, `host` (one more has come), `hung` (who was found to hang) or `did` (how much was
    told to those who watch)."""
    now: float = 0.0
    value: Any = None
    host: int = -1
    """Where a host told this: its number, and that it was so many-th thing that it told."""
    count: int = 0
    top_step: int = 0
    """How far the run was."""


def is_noise(what: object) -> bool:
    """Whether this says only how far somebody is."""
    return isinstance(what, _NOISE)


class Journal:
    """A journal that is being written."""

    def __init__(self, path: Path, fd: int, *, is_exact: bool) -> None:
        self._path = path
        self._fd = fd
        self.is_exact = is_exact
        """Whether decisions follow from steps and times as well: then nothing is left out."""

    @classmethod
    def create(cls, path: Path, head: Mapping[str, Any], *, is_exact: bool) -> Journal:
        """A new one. `head`: what whoever goes on must know besides."""
        with writing(path.parent):
            path.unlink(missing_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        journal = cls(path, fd, is_exact=is_exact)
        journal._append({**head, "is_exact": is_exact})
        return journal

    @classmethod
    def go_on(cls, path: Path, end: int, *, is_exact: bool) -> Journal:
        """One that another supervisor has left, up to where it is whole."""
        with writing(path.parent):
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.ftruncate(fd, end)
        return cls(path, fd, is_exact=is_exact)

    def write(self, entry: JournalEntry) -> None:
        """Note one more thing."""
        values = {one.name: _plain(getattr(entry, one.name)) for one in fields(entry)}
        self._append({name: value for name, value in values.items() if value is not None})

    def close(self) -> None:
        """The run is over here: nobody has to go on with it."""
        if self._fd != -1:
            os.close(self._fd)
            self._fd = -1
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _append(self, values: Mapping[str, Any]) -> None:
        if self._fd == -1:
            return
        try:
            os.write(self._fd, msgpack.packb(values))
        except OSError:
            self.close()  # A journal with a hole is worse than none: then nobody can go on.


@dataclass(frozen=True)
class RunPast:
    """What a journal tells."""

    head: Mapping[str, Any]
    entries: tuple[JournalEntry, ...]
    end: int
    """Where in the file the last whole entry ends."""

    @property
    def job(self) -> Job:
        """Of the attempt that goes on."""
        return Job.from_json(self.head["job"])


def read_journal(path: Path) -> RunPast | None:
    """What a supervisor that is gone has left; None where there is nothing, or others could have written it."""
    try:
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise LaunchError(f"{path} can be read or written by others, so it is not trusted; remove it.")
        with path.open("rb") as file:
            found = list(_parts(file.read()))
    except OSError:
        return None
    if not found:
        return None
    try:
        entries = tuple(_entry(values) for values, _ in found[1:])
        return RunPast(found[0][0], entries, found[-1][1])
    except (ShoalError, KeyError, TypeError, ValueError) as error:
        raise LaunchError(
            f"{path} cannot be understood ({error}); remove it to resume from a checkpoint."
        ) from None


def _parts(data: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=0)
    unpacker.feed(data)
    with suppress(msgpack.UnpackException, ValueError):  # A kill may have cut off the last one.
        for values in unpacker:
            yield values, unpacker.tell()


def _entry(values: Mapping[str, Any]) -> JournalEntry:
    return JournalEntry(**{name: _value(value) for name, value in values.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Told):
        return {_KIND: "Told", "message": value.as_message()}
    if is_dataclass(value) and not isinstance(value, type):
        own = {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
        return {_KIND: type(value).__name__, **own}
    if isinstance(value, Mapping):
        return {_KIND: "", "items": [[_plain(key), _plain(item)] for key, item in value.items()]}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.pop(_KIND)
    if kind == "Told":
        return read_message(value["message"], _WORDS)
    if kind == "":
        return {key: _value(item) for key, item in value["items"]}
    return _KINDS[kind](**{name: _value(item) for name, item in value.items()})
