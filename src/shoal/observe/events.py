"""`Event`: one thing that happened in a run, when, and to whom. `happenings.py` lists what there is to tell.

In `events.jsonl` it is one line: `{"kind": …, "rank": …, "values": {…}, "time": …}`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from shoal.errors import ProtocolError, SpecError
from shoal.observe.happenings import KINDS, Happening


@dataclass(frozen=True)
class Event:
    """One thing that happened."""

    what: Happening
    rank: int | None = None
    """The global rank it is about; None where it is about the run."""
    time: float = field(default_factory=time.time)
    """Seconds since 1970."""

    @property
    def kind(self) -> str:
        """What its kind is called in files."""
        return self.what.kind_name

    @property
    def values(self) -> dict[str, Any]:
        """What it tells, as plain data."""
        return self.what.plain()

    def to_json(self) -> str:
        """This event as one line of JSON."""
        return json.dumps({"kind": self.kind, "rank": self.rank, "values": self.values, "time": self.time})

    @classmethod
    def of(
        cls,
        kind: str,
        rank: int | None = None,
        values: Mapping[str, Any] | None = None,
        time: float | None = None,
    ) -> Event:
        """The event that this plain data tells; `ProtocolError` where there is none of this kind."""
        if kind not in KINDS:
            raise ProtocolError(f"There are no events of kind {kind!r}.")
        what = KINDS[kind].from_plain(values or {})
        return cls(what, rank) if time is None else cls(what, rank, time)

    @classmethod
    def from_json(cls, text: str) -> Event:
        """The event that `to_json` wrote."""
        try:
            found = cls.of(**json.loads(text))
        except (TypeError, ProtocolError, json.JSONDecodeError) as error:
            raise SpecError(f"Event: this is not an event written by Shoal ({error}).") from None
        if type(found.rank) not in (int, NoneType) or type(found.time) not in (int, float):
            raise SpecError("Event: this is not an event written by Shoal (its rank or time is no number).")
        return found
