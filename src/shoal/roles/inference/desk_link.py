"""A worker's line to the desk, where new records come from and rows go."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.comm.channel import Channel
from shoal.comm.desk_words import FROM_DESK, BatchAsked, BatchGiven, RowsMade
from shoal.comm.parcels import packed, unpacked
from shoal.spec.told import Told, read_message


@dataclass(frozen=True)
class Fetched:
    """The records of a batch as they came."""

    about: BatchGiven
    buffers: Sequence[memoryview]


class DeskLink:
    """One question at a time; the answer may be waited for."""

    def __init__(self, address: str) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(address)
        self._channel = Channel(sock, "the process that wants the predictions")

    def fetch(self, number: int, most: int, *, waits: bool) -> Fetched | None:
        """The records of a batch; None where there is no such batch, nor will be."""
        given, fds = self._ask(BatchAsked(number=number, most=most, waits=waits))
        return Fetched(given, unpacked(fds, given.sizes)) if isinstance(given, BatchGiven) else None

    def bring(self, number: int, rows: Mapping[str, np.ndarray]) -> None:
        """Hand over a batch's rows; returns when it is time for more."""
        made = RowsMade(
            number=number,
            arrays=[[name, array.dtype.str, list(array.shape)] for name, array in rows.items()],
            sizes=[array.nbytes for array in rows.values()],
        )
        with packed(rows.values()) as parcel:
            self._ask(made, [parcel])

    def close(self) -> None:
        """Hang up."""
        self._channel.close()

    def _ask(self, word: Told, fds: Sequence[int] = ()) -> tuple[Told, list[int]]:
        self._channel.send(word.as_message(), fds)
        message, answered = self._channel.receive_with_fds()
        return read_message(message, FROM_DESK), answered
