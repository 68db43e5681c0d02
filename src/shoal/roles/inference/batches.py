"""The batches that are to be predicted, by their numbers: of data with an end, or of what comes in meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shoal.comm.codec import decode
from shoal.comm.desk_words import LINES
from shoal.errors import SpecError
from shoal.feed.records import parse_line
from shoal.feed.sample_codec import unpack
from shoal.roles.inference.desk_link import DeskLink, Fetched
from shoal.roles.inference.new_inputs import NewInputs
from shoal.roles.inference.reading import Reading


@dataclass(frozen=True)
class InputBatch:
    """What the model is to see at a time."""

    inputs: Any
    count: int
    """Samples in it: none where a stream had nothing yet."""
    end: int
    """Samples up to its end."""


class Batches(Protocol):
    """Every worker may ask for any of them, and gets the same."""

    total: int
    """How many there are; 0 where nobody knows."""

    def take(self, number: int, *, waits: bool = True) -> InputBatch | None:
        """A batch; None where there is no such, nor will be."""


class KnownBatches:
    """Those of a data set that every worker can read."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self.total = reading.num_batches

    def take(self, number: int, *, waits: bool = True) -> InputBatch | None:
        if number >= self.total:
            return None
        samples = self._reading.samples(number)
        return InputBatch(self._reading.inputs(samples), len(samples), int(samples[-1]) + 1)


class ComingBatches:
    """Those of a stream, as the desk hands them out."""

    total = 0

    def __init__(self, reading: Reading, coming: NewInputs, link: DeskLink) -> None:
        self._reading = reading
        self._coming = coming
        self._link = link

    def take(self, number: int, *, waits: bool = True) -> InputBatch | None:
        fetched = self._link.fetch(number, self._reading.task.batch_size, waits=waits)
        if fetched is None:
            return None
        start, count = fetched.about.start, fetched.about.count
        if not count:
            return InputBatch(None, 0, start)
        self._coming.records, self._coming.start = _records(fetched), start
        return InputBatch(self._reading.inputs(np.arange(count)), count, start + count)


def _records(fetched: Fetched) -> list[Any]:
    if fetched.about.form != LINES:
        message = decode(list(fetched.buffers))
        return [unpack(record, list(message.frames)) for record in message.fields["records"]]
    [text] = fetched.buffers
    return [_parsed(line, fetched.about.start + at) for at, line in enumerate(str(text, "utf-8").split("\n"))]


def _parsed(line: str, number: int) -> Any:
    try:
        return parse_line(line)
    except ValueError as error:
        raise SpecError(
            f"predict: line {number + 1} of the input is {line[:60]!r}, which is neither JSON nor numbers between "
            f"commas ({error})."
        ) from None
