"""Dataclasses as the small values of a message, every field checked when it arrives."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from shoal.errors import ProtocolError
from shoal.spec.told import read_value


class MessageForm:
    """What the fields of one kind of message have to be, but for those that travel in another way."""

    def __init__(self, cls: type, *, but: Collection[str] = ()) -> None:
        hints, small = get_type_hints(cls), [one for one in fields(cls) if one.name not in but]
        self._types = {one.name: hints[one.name] for one in small}
        self._required = frozenset(
            one.name for one in small if one.default is MISSING and one.default_factory is MISSING
        )

    def plain(self, values: object) -> dict[str, Any]:
        """Its fields by their names."""
        return {name: getattr(values, name) for name in self._types}

    def read(self, kind: str, found: Mapping[str, Any]) -> dict[str, Any]:
        """Fields as they arrived; `ProtocolError` unless they are what `plain` gives."""
        if not self._required <= found.keys() <= self._types.keys():
            raise ProtocolError(f"A message {kind!r} has the fields {sorted(self._types)}, found others.")
        return {name: self._value(kind, name, value) for name, value in found.items()}

    def _value(self, kind: str, name: str, value: Any) -> Any:
        wanted = self._types[name]
        try:
            return value if type(value) is wanted else read_value(value, wanted)
        except (TypeError, ValueError):
            raise ProtocolError(f"Field {name!r} of a message {kind!r} has the wrong type.") from None
