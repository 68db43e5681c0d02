"""Dataclasses as the small values of a message, every field checked when it arrives."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from shoal.errors import ProtocolError


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

    def checked(self, kind: str, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fields as they arrived; `ProtocolError` unless they are what `plain` gives."""
        if not self._required <= found.keys() <= self._types.keys():
            raise ProtocolError(f"A message {kind!r} has the fields {sorted(self._types)}, found others.")
        for name, value in found.items():
            wanted = self._types[name]
            if type(value) is not wanted and not _fits(value, wanted):
                raise ProtocolError(f"Field {name!r} of a message {kind!r} has the wrong type.")
        return found


def _fits(value: Any, kind: Any) -> bool:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (list, Sequence):
        return isinstance(value, list | tuple) and all(_fits(item, arguments[0]) for item in value)
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(
            _fits(key, arguments[0]) and _fits(item, arguments[1]) for key, item in value.items()
        )
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in arguments)
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind
