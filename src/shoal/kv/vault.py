"""Memory that outlives the process that writes it: tables by name, who has asked for what, and an undo journal.

It is a memfd that whoever starts a server holds, too. One that is killed leaves its tables there; the next puts
back what was half done, and goes on. Pages that nobody has touched take no memory.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shoal.errors import SpecError

MOST_CLIENTS = 4096
_HEADER_BYTES, _DIRECTORY_BYTES = 4096, 4 << 20
_CLIENTS_AT = _HEADER_BYTES + 2 * _DIRECTORY_BYTES
_JOURNAL_AT = 1 << 28
_DATA_AT = 17 << 30
VAULT_BYTES = 96 << 30
_ALIGN = 4096
_FREE, _OPEN, _JOURNAL_BYTES, _WHICH, _LENGTH = 0, 1, 2, 3, 4
"""Words of the header: where free memory begins; whether the journal is needed, and how long it is; which
directory is the true one, and how long both are."""


def make_memory() -> int:
    """A descriptor for a new vault."""
    fd = os.memfd_create("shoal-kv")
    os.ftruncate(fd, VAULT_BYTES)
    return fd


class Vault:
    """One process's view of it; one process at a time writes."""

    def __init__(self, fd: int) -> None:
        self._bytes = torch.frombuffer(mmap.mmap(fd, VAULT_BYTES), dtype=torch.uint8)
        self._words = self._bytes[:_HEADER_BYTES].view(torch.int64)
        clients = self._bytes[_CLIENTS_AT : _CLIENTS_AT + 32 * MOST_CLIENTS].view(MOST_CLIENTS, 32)
        self._ids, self._sequences = clients[:, :16], clients[:, 16:].view(torch.int64)[:, 0]
        self._tables: dict[str, Tensor] = {}
        self._offsets: dict[int, tuple[int, int]] = {}
        """By the address of a table: where it begins, and the bytes of a row."""
        if not int(self._words[_FREE]):
            self._words[_FREE] = _DATA_AT
        self._undo()
        self.directory: dict[str, Any] = self._read_directory()
        self._rows = {
            bytes(self._ids[row].tolist()): row for row in range(MOST_CLIENTS) if int(self._sequences[row])
        }

    def write_directory(self) -> None:
        """What `directory` says by now is true from here on, for whoever comes next, too."""
        text = json.dumps(self.directory).encode()
        if len(text) > _DIRECTORY_BYTES:
            raise SpecError(f"The names of a server's keys take {len(text)} bytes; use fewer or shorter ones.")
        other = 1 - int(self._words[_WHICH])
        start = _HEADER_BYTES + other * _DIRECTORY_BYTES
        self._bytes[start : start + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._words[_LENGTH + other] = len(text)
        self._words[_WHICH] = other  # until here the old one counts

    def _read_directory(self) -> dict[str, Any]:
        which = int(self._words[_WHICH])
        start, length = _HEADER_BYTES + which * _DIRECTORY_BYTES, int(self._words[_LENGTH + which])
        return json.loads(bytes(self._bytes[start : start + length].tolist())) if length else {}

    def reserve(self, rows: int, row_bytes: int) -> int:
        """Memory of zeros; where it begins."""
        start = int(self._words[_FREE])
        end = start + -(-max(1, rows * row_bytes) // _ALIGN) * _ALIGN
        if end > VAULT_BYTES:
            raise SpecError(f"A server holds {(VAULT_BYTES - _DATA_AT) >> 30} GiB at most; use more servers.")
        self._words[_FREE] = end
        return start

    def table(self, start: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """The rows that lie there."""
        nbytes = rows * columns * dtype.itemsize
        found = self._bytes[start : start + nbytes].view(dtype).view(rows, columns)
        self._offsets[found.data_ptr()] = start, columns * dtype.itemsize
        return found

    def last_sequence(self, client: bytes) -> int:
        """The number of the last change that was made for a client."""
        row = self._rows.get(client)
        return 0 if row is None else int(self._sequences[row])

    @contextmanager
    def change(self, client: bytes, sequence: int, parts: list[tuple[Tensor, Tensor | slice]]) -> Iterator[None]:
        """In the block, rows of tables change, and with them this client's number: all of it, or nothing where the
        process dies. `parts`: which rows of which tables."""
        row = self._row_of(client)
        end = _JOURNAL_AT + 8
        self._bytes[_JOURNAL_AT:end].view(torch.int64)[0] = row
        end = self._note(
            end, self._sequences[row : row + 1].view(1, 1), slice(0, 1), _CLIENTS_AT + 32 * row + 16, 8
        )
        for table, rows in parts:
            end = self._note(end, table, rows, *self._offsets[table.data_ptr()])
        self._words[_JOURNAL_BYTES] = end - _JOURNAL_AT
        self._words[_OPEN] = 1
        try:
            yield
        except Exception:
            self._undo()
            raise
        self._sequences[row] = sequence
        self._words[_OPEN] = 0

    def _row_of(self, client: bytes) -> int:
        if client not in self._rows:
            row = len(self._rows)
            if row == MOST_CLIENTS:
                raise SpecError(f"{MOST_CLIENTS} clients have changed something here, and no more can.")
            self._ids[row] = torch.tensor(list(client), dtype=torch.uint8)
            self._rows[client] = row
        return self._rows[client]

    def _note(self, at: int, table: Tensor, rows: Tensor | slice, offset: int, row_bytes: int) -> int:
        """Write down what rows are before they change; where the next note begins."""
        if isinstance(rows, slice):
            rows = torch.arange(rows.start, rows.stop)
        count = len(rows)
        head = self._bytes[at : at + 24].view(torch.int64)
        head[0], head[1], head[2] = offset, row_bytes, count
        numbers = self._bytes[at + 24 : at + 24 + 8 * count].view(torch.int64)
        numbers.copy_(rows)
        start = at + 24 + 8 * count
        room = self._bytes[start : start + row_bytes * count].view(table.dtype).view(count, -1)
        if count:
            torch.index_select(table, 0, rows, out=room)
        return start + -(-row_bytes * count // 8) * 8

    def _undo(self) -> None:
        """Put back what the last writer had begun to change."""
        if not int(self._words[_OPEN]):
            return
        at, end = _JOURNAL_AT + 8, _JOURNAL_AT + int(self._words[_JOURNAL_BYTES])
        while at < end:
            offset, row_bytes, count = self._bytes[at : at + 24].view(torch.int64).tolist()
            rows = self._bytes[at + 24 : at + 24 + 8 * count].view(torch.int64)
            start = at + 24 + 8 * count
            if count:
                last = int(rows.max()) + 1
                table = self._bytes[offset : offset + last * row_bytes].view(last, row_bytes)
                table[rows] = self._bytes[start : start + row_bytes * count].view(count, row_bytes)
            at = start + -(-row_bytes * count // 8) * 8
        self._words[_OPEN] = 0
