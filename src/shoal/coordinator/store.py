"""The coordinator's durable memory: a term, and the state that the holder of that term saved last.

Whoever coordinates first claims a higher term. From then on nothing can be saved under a lower one, so what the
new coordinator loads after its claim is the last that its predecessor could have told anybody.

Terms order the coordinators of one attempt at a run. Another attempt (the run resumed, or begun anew in the same
place) has a name of its own, and neither sees nor changes what the first one keeps.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgpack

from shoal.errors import ShoalError

BUSY_TIMEOUT_S = 5.0


class Superseded(ShoalError):
    """Another coordinator has claimed a higher term: whoever gets this has nothing to say any more."""


class StoreError(ShoalError):
    """The store cannot be read or written now."""


class DurableStore(Protocol):
    """What a coordinator keeps so that another can take over. State is plain data."""

    def load(self) -> tuple[int, dict[str, Any] | None]:
        """The highest term claimed (0: none) and the state saved last (None: none)."""

    def claim(self, term: int) -> bool:
        """Make `term` the one that may save; whether it was higher than every term before."""

    def save(self, term: int, state: dict[str, Any]) -> None:
        """Replace the state, durably before this returns; `Superseded` unless `term` is the one claimed last."""

    def forget(self) -> None:
        """The run is over, and nobody will ask: leave nothing in a place that others use, too."""


def pack_state(state: dict[str, Any]) -> bytes:
    """State as stores keep it."""
    packed: bytes = msgpack.packb(state)
    return packed


def unpack_state(packed: bytes) -> dict[str, Any]:
    """What `pack_state` packed."""
    try:
        state = msgpack.unpackb(packed, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise StoreError(f"The coordinator's saved state cannot be read ({error}); start the run anew.") from None
    if not isinstance(state, dict):
        raise StoreError("The coordinator's saved state is not one that Shoal wrote; start the run anew.")
    return state


def superseded_by(term: int, found: int) -> Superseded:
    """The error for saving under `term` when `found` has been claimed."""
    return Superseded(f"Term {term} may not save: term {found} was claimed; this coordinator must stop.")


class MemoryStore:
    """As durable as the object: where a coordinator has no successor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._term = 0
        self._packed: bytes | None = None

    def load(self) -> tuple[int, dict[str, Any] | None]:
        with self._lock:
            return self._term, None if self._packed is None else unpack_state(self._packed)

    def claim(self, term: int) -> bool:
        with self._lock:
            if term <= self._term:
                return False
            self._term = term
            return True

    def save(self, term: int, state: dict[str, Any]) -> None:
        packed = pack_state(state)
        with self._lock:
            if term != self._term:
                raise superseded_by(term, self._term)
            self._packed = packed

    def forget(self) -> None:
        with self._lock:
            self._term, self._packed = 0, None


class SqliteStore:
    """A file on one host. What was saved survives `kill -9` at any point, and a power cut."""

    def __init__(self, path: Path, attempt: str) -> None:
        self._path = path
        self._attempt = attempt
        self._make_private()
        with self._transaction() as database:
            columns = "attempt TEXT PRIMARY KEY, term INTEGER NOT NULL, state BLOB"
            database.execute(f"CREATE TABLE IF NOT EXISTS coordinator ({columns})")
            database.execute("INSERT OR IGNORE INTO coordinator VALUES (?, 0, NULL)", (attempt,))

    def load(self) -> tuple[int, dict[str, Any] | None]:
        with self._transaction() as database:
            term, packed = self._read(database)
        return term, None if packed is None else unpack_state(packed)

    def claim(self, term: int) -> bool:
        with self._transaction() as database:
            given = (term, self._attempt, term)
            cursor = database.execute("UPDATE coordinator SET term = ? WHERE attempt = ? AND term < ?", given)
            return cursor.rowcount == 1

    def save(self, term: int, state: dict[str, Any]) -> None:
        given = (pack_state(state), self._attempt, term)
        with self._transaction() as database:
            cursor = database.execute("UPDATE coordinator SET state = ? WHERE attempt = ? AND term = ?", given)
            if cursor.rowcount != 1:
                raise superseded_by(term, self._read(database)[0])

    def forget(self) -> None:
        """The file is the run's own: it stays in its folder."""

    def _read(self, database: sqlite3.Connection) -> tuple[int, bytes | None]:
        given = (self._attempt,)
        found = database.execute("SELECT term, state FROM coordinator WHERE attempt = ?", given).fetchone()
        if found is None:
            raise Superseded(f"{self._path} is another attempt's by now; this coordinator must stop.")
        return found

    def _make_private(self) -> None:
        """Make the file here and not by SQLite, so that others cannot read it, not even for a moment."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            os.fchmod(file, 0o600)
            os.close(file)
        except OSError as error:
            raise StoreError(
                f"The coordinator's state cannot be kept in {self._path} ({error.strerror}); choose another place."
            ) from None

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A connection of its own for each transaction: nothing to leak into forked children or other threads."""
        try:
            database = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            try:
                database.execute("PRAGMA synchronous = EXTRA")
                database.execute("BEGIN IMMEDIATE")
                with database:
                    yield database
            finally:
                database.close()
        except sqlite3.Error as error:
            raise StoreError(
                f"The coordinator's state in {self._path} cannot be read or written ({error}); "
                "check the disk and the file."
            ) from error
