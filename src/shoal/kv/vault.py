"""Memory that outlives the process that writes it: tables by name, who has asked for what, and a journal.

It is a memfd that whoever starts a server holds, too. All processes of a host that have it may read and write, one
writer at a time: a change is made in the journal first, which is a copy of the rows in question, and then written
over them. Who is killed before that has changed nothing, and what one has begun to write over the next finishes.
Locks go with their owner. Pages that nobody has touched take no memory.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.errors import SpecError

MOST_CLIENTS = 4096
MEMORY_NAME = "shoal-kv"
_HEADER_BYTES, _DIRECTORY_BYTES = 4096, 4 << 20
_CLIENTS_AT = _HEADER_BYTES + 2 * _DIRECTORY_BYTES
JOURNAL_AT = 1 << 28
DATA_AT = 17 << 30
VAULT_BYTES = 96 << 30
_ALIGN = 4096
_FREE, _OPEN, _JOURNAL_BYTES, _EDITION, _LENGTH, _INDEX, _GENERATION, _TOKEN = 0, 1, 2, 3, 4, 6, 7, 8
"""Words of the header: where free memory begins; whether the journal is to be written over tables, and how long it
is; how often the directory was written, which says where the true one of two is, and how long both are; how many
changes were made; in which generation of the shard's holders this is all of it; and a number that no other has."""
GENERATION_AT = 8 * _GENERATION
_CHANGING, _WRITING = 0, 1
"""What is locked: who prepares a change, and the tables while they are written."""
_NOTE_BYTES, _NOTE_ALIGN = 64, 64
Rows = Tensor | slice


def make_memory() -> int:
    """A descriptor for a new vault."""
    fd = os.memfd_create(MEMORY_NAME)
    os.ftruncate(fd, VAULT_BYTES)
    return fd


class Vault:
    """One process's view of it."""

    def __init__(self, fd: int) -> None:
        # Locks belong to an opening of the file, which a descriptor shares with the process that it came from.
        self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(self.fd, VAULT_BYTES)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._words = self._bytes[:_HEADER_BYTES].view(np.int64)
        clients = self._bytes[_CLIENTS_AT : _CLIENTS_AT + 32 * MOST_CLIENTS].reshape(MOST_CLIENTS, 32)
        self._ids, numbers = clients[:, :16], clients[:, 16:].view(np.int64)
        self._sequences, self._changed_at = numbers[:, 0], numbers[:, 1]
        self._offsets: dict[int, tuple[int, int, int]] = {}
        """By the address of a table: where it begins, its rows, and the bytes of one."""
        self._rows: dict[bytes, int] = {}
        self._edition = -1
        self.directory: dict[str, Any] = {}
        with self.changing():
            if not self._words[_FREE]:
                self._words[_FREE], self._words[_TOKEN] = DATA_AT, secrets.randbits(62)

    def close(self) -> None:
        """Let go of it; what was mapped stays until nobody has a view of it."""
        os.close(self.fd)

    @property
    def edition(self) -> int:
        """Rises with every change of the directory, of which `directory` is the one last seen under a lock."""
        return self._edition

    @property
    def index(self) -> int:
        """How many changes were made."""
        return int(self._words[_INDEX])

    @property
    def generation(self) -> int:
        """Of the shard's holders, when this was all of the shard; 0: never."""
        return int(self._words[_GENERATION])

    @generation.setter
    def generation(self, generation: int) -> None:
        self._words[_GENERATION] = generation

    @property
    def token(self) -> int:
        """No other vault has it."""
        return int(self._words[_TOKEN])

    def forget(self) -> None:
        """Read the directory anew before the next use: what `directory` says may not be what was written."""
        self._edition = -1

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Nobody else changes anything meanwhile."""
        self._lock(_CHANGING, fcntl.F_WRLCK)
        try:
            if self._words[_OPEN]:
                self._write_over()  # as whoever died in the midst of it would have
            self._refresh()
            yield
        finally:
            self._lock(_CHANGING, fcntl.F_UNLCK)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Tables stay as they are meanwhile."""
        self._lock(_WRITING, fcntl.F_RDLCK)
        try:
            while self._words[_OPEN]:
                self._lock(_WRITING, fcntl.F_UNLCK)
                with self.changing():
                    pass
                self._lock(_WRITING, fcntl.F_RDLCK)
            self._refresh()
            yield
        finally:
            self._lock(_WRITING, fcntl.F_UNLCK)

    def write_directory(self) -> None:
        """What `directory` says by now is true from here on, for whoever comes next, too."""
        text = json.dumps(self.directory).encode()
        if len(text) > _DIRECTORY_BYTES:
            raise SpecError(f"The names of a server's keys take {len(text)} bytes; use fewer or shorter ones.")
        edition = int(self._words[_EDITION]) + 1
        start = _HEADER_BYTES + edition % 2 * _DIRECTORY_BYTES
        self._bytes[start : start + len(text)] = np.frombuffer(text, dtype=np.uint8)
        self._words[_LENGTH + edition % 2] = len(text)
        self._words[_EDITION] = self._edition = edition  # until here the old one counts

    def drop(self) -> None:
        """Have nothing in it, but for who has asked for what."""
        self.directory = {}
        self.write_directory()
        self._offsets.clear()
        used = int(self._words[_FREE]) - DATA_AT
        if used:
            self._map.madvise(mmap.MADV_REMOVE, DATA_AT, used)
        self._words[_FREE] = DATA_AT

    def _refresh(self) -> None:
        edition = int(self._words[_EDITION])
        if edition == self._edition:
            return
        start, length = _HEADER_BYTES + edition % 2 * _DIRECTORY_BYTES, int(self._words[_LENGTH + edition % 2])
        self.directory = json.loads(self._bytes[start : start + length].tobytes()) if length else {}
        self._edition = edition

    def reserve(self, rows: int, row_bytes: int) -> int:
        """Memory of zeros; where it begins."""
        start = int(self._words[_FREE])
        end = start + -(-max(1, rows * row_bytes) // _ALIGN) * _ALIGN
        if end > VAULT_BYTES:
            raise SpecError(f"A server holds {(VAULT_BYTES - DATA_AT) >> 30} GiB at most; use more servers.")
        self._words[_FREE] = end
        return start

    def table(self, start: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """The rows that lie there."""
        found = self._tensor(start, rows, columns, dtype)
        self._offsets[found.data_ptr()] = start, rows, columns * dtype.itemsize
        return found

    def _tensor(self, start: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        plain = torch.from_numpy(self._bytes[start : start + rows * columns * dtype.itemsize])
        return plain.view(dtype).view(rows, columns)

    def last_sequence(self, client: bytes) -> int:
        """The number of the last change that was made for a client."""
        row = self._row_of(client)
        return 0 if row is None else int(self._sequences[row])

    def _row_of(self, client: bytes) -> int | None:
        row = self._rows.get(client)
        if row is not None and self._ids[row].tobytes() == client:
            return row
        found = np.flatnonzero((self._ids == np.frombuffer(client, dtype=np.uint8)).all(axis=1))
        if not len(found):
            return None
        self._rows[client] = int(found[0])
        return self._rows[client]

    def _new_row(self, client: bytes) -> int:
        """Where none is left, that of who has changed nothing for longest: so many others have meanwhile that it
        repeats nothing any more."""
        row = int(self._changed_at.argmin())
        self._sequences[row] = 0  # first, lest the old number be the new client's where this process dies
        self._ids[row] = np.frombuffer(client, dtype=np.uint8)
        return row

    @contextmanager
    def change(self, client: bytes, sequence: int) -> Iterator[VaultChange]:
        """In the block, copies of rows change; behind it, the rows do, and with them this client's number: all of
        it, or nothing where the process dies or the block raises. Under `changing`."""
        row = self._row_of(client)
        if row is None:
            row = self._new_row(client)
        change = VaultChange(self)
        yield change
        index = int(self._words[_INDEX]) + 1
        change.set_words(_CLIENTS_AT + 32 * row + 16, sequence, index)
        change.set_words(8 * _INDEX, index)
        self._words[_JOURNAL_BYTES] = change.end - JOURNAL_AT
        self._write_over()

    def _write_over(self) -> None:
        """What the journal says is written where it belongs."""
        self._lock(_WRITING, fcntl.F_WRLCK)
        try:
            self._words[_OPEN] = 1  # from here on it is made, whoever does it
            at, end = JOURNAL_AT, JOURNAL_AT + int(self._words[_JOURNAL_BYTES])
            while at < end:
                at = self._write_note(at)
            self._words[_OPEN] = 0
        finally:
            self._lock(_WRITING, fcntl.F_UNLCK)

    def _write_note(self, at: int) -> int:
        offset, row_bytes, count, start, numbers_at, data_at, behind = (
            self._bytes[at : at + 56].view(np.int64).tolist()
        )
        data = self._bytes[data_at : data_at + count * row_bytes]
        if numbers_at:
            numbers = self._bytes[numbers_at : numbers_at + 8 * count].view(np.int64)
            if count:
                table = self._bytes[offset : offset + (int(numbers.max()) + 1) * row_bytes]
                _as_items(table, row_bytes)[numbers] = _as_items(data, row_bytes)
        else:
            self._bytes[offset + start * row_bytes :][: count * row_bytes] = data
        return behind

    def _lock(self, what: int, how: int) -> None:
        # Of this opening of the file, and gone with it: the kernel's lock outlives no process.
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", how, os.SEEK_SET, what, 1, 0))

    def room(self, start: int, count: int, columns: int, dtype: torch.dtype) -> Tensor:
        """A part of the journal."""
        if start + count * columns * dtype.itemsize > DATA_AT:
            raise SpecError(f"A push changes {(DATA_AT - JOURNAL_AT) >> 30} GiB at most; use more servers.")
        return self._tensor(start, count, columns, dtype)

    def place_of(self, table: Tensor) -> tuple[int, int, int]:
        """Where a table begins, its rows, and the bytes of one."""
        return self._offsets[table.data_ptr()]

    def note(self, at: int, words: list[int]) -> None:
        """Write the head of a part of the journal."""
        self._bytes[at : at + 8 * len(words)].view(np.int64)[:] = words

    def gather(self, offset: int, rows: int, row_bytes: int, numbers_at: int, count: int, data_at: int) -> None:
        """Copy rows of a table to the journal, where their numbers stand already."""
        numbers = self._bytes[numbers_at : numbers_at + 8 * count].view(np.int64)
        if int(numbers.min()) < 0 or int(numbers.max()) >= rows:
            raise SpecError(
                f"kv: rows are below {rows} here, found {int(numbers.min())} to {int(numbers.max())}; name others."
            )
        table = _as_items(self._bytes[offset : offset + rows * row_bytes], row_bytes)
        room = _as_items(self._bytes[data_at : data_at + count * row_bytes], row_bytes)
        table.take(numbers, out=room, mode="clip")  # none is clipped, and so numpy needs no copy of its own


class VaultChange:
    """What is to become of some rows of some tables."""

    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self.end = JOURNAL_AT

    def rows(self, table: Tensor, where: Rows) -> Tensor:
        """A copy of rows, to be changed in place: so they become."""
        vault, (offset, total, row_bytes) = self._vault, self._vault.place_of(table)
        at = self.end
        if isinstance(where, slice):
            start, count, numbers_at = where.start, where.stop - where.start, 0
            data_at = at + _NOTE_BYTES
            if not 0 <= start <= where.stop <= total:
                raise SpecError(f"kv: rows are below {total} here, found {start} to {where.stop}; name others.")
        else:
            start, count, numbers_at = 0, len(where), at + _NOTE_BYTES
            data_at = _aligned(numbers_at + 8 * count)
        room = vault.room(data_at, count, table.shape[1], table.dtype)
        if not isinstance(where, slice):
            vault.room(numbers_at, 1, count, torch.int64)[0] = where
            if count:
                vault.gather(offset, total, row_bytes, numbers_at, count, data_at)
        else:
            room.copy_(table[where])
        self.end = _aligned(data_at + count * row_bytes)
        vault.note(at, [offset, row_bytes, count, start, numbers_at, data_at, self.end])
        return room

    def set_words(self, offset: int, *values: int) -> None:
        """Numbers of the vault's own."""
        at, data_at, num_bytes = self.end, self.end + _NOTE_BYTES, 8 * len(values)
        self.end = _aligned(data_at + num_bytes)
        self._vault.note(at, [offset, num_bytes, 1, 0, 0, data_at, self.end])
        self._vault.note(data_at, list(values))


def _aligned(at: int) -> int:
    return -(-at // _NOTE_ALIGN) * _NOTE_ALIGN


def _as_items(plain: NDArray[np.uint8], nbytes: int) -> NDArray[Any]:
    """Rows as items of so many bytes each: whatever they mean, they are copied as they are."""
    return plain.view(np.dtype((np.void, nbytes)))
