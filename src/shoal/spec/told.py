"""`Told`: what one process tells another, or leaves in a file: typed here, plain data on the way, then checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import NoneType
from typing import Any, ClassVar, Self, TypeVar, cast, dataclass_transform, get_args, get_origin, get_type_hints

from shoal.errors import ProtocolError

_MORE = "more"
_MOST_SHOWN = 60


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
@dataclass(frozen=True, kw_only=True)
class Told:
    """One thing that is told: each subclass is a frozen dataclass of plain data, for one kind.

    A field whose default is None is left out where it is None; a field `more` holds the keys that have no field of
    their own, which lie beside the others on the way. Keys that nobody knows are passed over.
    """

    kind_name: ClassVar[str] = ""
    """What this kind is called on the way."""

    def __init_subclass__(cls, *, kind: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclass(frozen=True, kw_only=True)(cls)
        cls.kind_name = kind

    def plain(self) -> dict[str, Any]:
        """The fields by their names."""
        left_out = _shape_of(type(self)).left_out
        values = {name: value for name, value in vars(self).items() if value is not None or name not in left_out}
        more = values.pop(_MORE, {})
        return {**values, **more}

    def as_message(self) -> dict[str, Any]:
        """The fields and the kind, as a channel carries them."""
        return {"kind": self.kind_name, **self.plain()}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Self:
        """What `plain` made, every field checked; `ProtocolError` for anything else."""
        shape, make = _shape_of(cls), cast(Callable[..., Self], cls)
        try:
            found = {name: read_value(values[name], kind) for name, kind in shape.types.items() if name in values}
            if shape.keeps_more:
                found[_MORE] = {name: value for name, value in values.items() if name not in shape.types}
            return make(**found)
        except (TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"This is not what {cls.kind_name!r} tells ({error}).") from None


T = TypeVar("T", bound=Told)


def by_kind(*classes: type[T]) -> dict[str, type[T]]:
    """A list of kinds, by what they are called."""
    return {one.kind_name: one for one in classes}


def read_message(message: Mapping[str, Any], kinds: Mapping[str, type[T]]) -> T:
    """What `Told.as_message` made, one of `kinds`; `ProtocolError` for anything else."""
    values = dict(message)
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        raise ProtocolError(f"Nothing is told under the name {_shown(kind)}.")
    return kinds[kind].from_plain(values)


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """What the fields of one kind have to be."""

    types: dict[str, Any]
    left_out: frozenset[str]
    """Those that need not be there."""
    keeps_more: bool


_SHAPES: dict[type[Told], _Shape] = {}


def _shape_of(cls: type[Told]) -> _Shape:
    if cls not in _SHAPES:
        hints = get_type_hints(cls)
        own = [one for one in fields(cls) if one.name != _MORE]
        _SHAPES[cls] = _Shape(
            types={one.name: hints[one.name] for one in own},
            left_out=frozenset(one.name for one in own if one.default is None),
            keeps_more=len(own) < len(fields(cls)),
        )
    return _SHAPES[cls]


def read_value(value: Any, kind: Any) -> Any:
    """Plain data as a value of this type; TypeError or ValueError where it is none."""
    if kind is Any:
        return value
    arguments = get_args(kind)
    if NoneType in arguments:
        return None if value is None else read_value(value, arguments[0])
    if get_origin(kind) in (list, Sequence) and isinstance(value, list | tuple):
        wanted = arguments[0]
        is_plain = wanted is Any or all(type(item) is wanted for item in value)
        return list(value) if is_plain else [read_value(item, wanted) for item in value]
    if get_origin(kind) in (dict, Mapping) and isinstance(value, dict):
        return {read_value(key, arguments[0]): read_value(item, arguments[1]) for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(value)
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise TypeError(f"found {_shown(value)}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
