"""A worker's line to the desk, where new records come from and rows go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.comm.desk_words import FROM_DESK, BatchAsked, BatchGiven, RowsMade
from shoal.comm.parcel_lines import MemoryLine, ParcelLine, StreamLine
from shoal.comm.security import RunKey
from shoal.spec.told import Told, read_message


@dataclass(frozen=True)
class Fetched:
    """The records of a batch as they came."""

    about: BatchGiven
    buffers: Sequence[memoryview]


class DeskLink:
    """One question at a time; the answer may be waited for."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """`options`: those of the job, which say where the desk is."""
        address, key = options["desk"], options.get("desk_key")
        self._line: ParcelLine = (
            MemoryLine.call(address, "the process that wants the predictions")
            if key is None
            else StreamLine.call(address, RunKey.from_text(key))
        )

    def fetch(self, number: int, most: int, *, waits: bool) -> Fetched | None:
        """The records of a batch; None where there is no such batch, nor will be."""
        given, buffers = self._ask(BatchAsked(number=number, most=most, waits=waits))
        return Fetched(given, buffers) if isinstance(given, BatchGiven) else None

    def bring(self, number: int, rows: Mapping[str, np.ndarray]) -> None:
        """Hand over a batch's rows; returns when it is time for more."""
        made = RowsMade(
            number=number,
            arrays=[[name, array.dtype.str, list(array.shape)] for name, array in rows.items()],
            sizes=[array.nbytes for array in rows.values()],
        )
        self._ask(made, rows.values())

    def close(self) -> None:
        """Hang up."""
        self._line.close()

    def _ask(self, word: Told, buffers: Iterable[np.ndarray] = ()) -> tuple[Told, list[memoryview]]:
        self._line.send(word, [np.ascontiguousarray(buffer) for buffer in buffers])
        message, answered = self._line.receive()
        return read_message(message, FROM_DESK), answered
