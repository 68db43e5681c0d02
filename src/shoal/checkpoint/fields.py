"""Read fields of JSON that nobody vouches for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

MOST_SECONDS = 1e11


class Malformed(ValueError):
    """The data is not what was expected; the text says where."""


class Fields:
    """One JSON object; every field is asked for by name and kind."""

    def __init__(self, owner: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise Malformed(f"{owner} is not an object")
        self.owner = owner
        self.values: dict[str, Any] = values

    def require_keys(self, names: Iterable[str]) -> None:
        """These fields, and no others."""
        if set(self.values) != set(names):
            raise Malformed(f"{self.owner} must have exactly {', '.join(names)}")

    def inner(self, name: str) -> Fields:
        """An object."""
        return Fields(f"{name!r} of {self.owner}", self._get(name))

    def each(self, name: str) -> Iterator[Fields]:
        """A list of objects."""
        for index, value in enumerate(self._list(name)):
            yield Fields(f"{name!r} {index} of {self.owner}", value)

    def count(self, name: str, most: int, *, least: int = 0) -> int:
        """A whole number within limits."""
        return self._whole(name, self._get(name), most, least)

    def counts(self, name: str, most: int) -> tuple[int, ...]:
        """A list of whole numbers within limits."""
        return tuple(self._whole(name, value, most, 0) for value in self._list(name))

    def seconds(self, name: str) -> float:
        """A number of at least 0 that a calendar can still show as seconds."""
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Malformed(f"{name!r} of {self.owner} is not a number")
        if not 0 <= value <= MOST_SECONDS:
            raise Malformed(f"{name!r} of {self.owner} is out of range")
        return float(value)

    def text(self, name: str) -> str:
        """A text."""
        return self._text(name, self._get(name))

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        return tuple(self._text(name, value) for value in self._list(name))

    def _get(self, name: str) -> Any:
        if name not in self.values:
            raise Malformed(f"{self.owner} has no {name!r}")
        return self.values[name]

    def _list(self, name: str) -> list[Any]:
        value = self._get(name)
        if not isinstance(value, list):
            raise Malformed(f"{name!r} of {self.owner} is not a list")
        return value

    def _text(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise Malformed(f"{name!r} of {self.owner} is not a text")
        return value

    def _whole(self, name: str, value: Any, most: int, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise Malformed(f"{name!r} of {self.owner} is not a whole number from {least} to {most}")
        return value
