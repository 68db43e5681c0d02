"""What workers that predict and the desk of whoever wants the rows say to each other: a question, an answer."""

from __future__ import annotations

from typing import Any

from shoal.spec.told import Told, by_kind

ONLY = ""
"""The name of a model's output where it has but one."""
STREAM = "-"
"""In the place of a path: what is to be predicted comes while workers compute."""
LINES, VALUES = "lines", "values"
"""What the records of a batch are: lines of text, or what a program gave."""


class BatchAsked(Told, kind="batch"):
    """A worker wants the records of a batch."""

    number: int
    most: int
    """Records of a batch."""
    waits: bool
    """Whether there is time until some have come; else the batch may be empty."""


class RowsMade(Told, kind="rows"):
    """What the model makes of a batch; a parcel comes with it."""

    number: int
    arrays: list[list[Any]]
    """`[name, dtype, shape]` each."""
    sizes: list[int]
    """Their bytes in the parcel."""


class BatchGiven(Told, kind="given"):
    """The records of a batch; a parcel comes with it."""

    form: str
    count: int
    start: int
    """Records before it."""
    sizes: list[int]


class NoMore(Told, kind="no_more"):
    """There is no such batch, nor will there be."""


class RowsTaken(Told, kind="taken"):
    """The worker need not keep the rows any longer, and may go on."""


FROM_WORKERS: dict[str, type[Told]] = by_kind(BatchAsked, RowsMade)
FROM_DESK: dict[str, type[Told]] = by_kind(BatchGiven, NoMore, RowsTaken)
