"""The few checks that every spec repeats, each with the same three-part sentence."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from shoal.errors import SpecError, unknown


def require_count(owner: str, name: str, value: Any, *, least: int = 1, most: int | None = None) -> None:
    """`value` must be a whole number of at least `least`, and at most `most` where that is given."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"{owner}: {name} must be a whole number of at least {least}, found {value!r}.")
    if most is not None and value > most:
        raise SpecError(f"{owner}: {name} must be at most {most}, found {value}.")


def require_callable(owner: str, name: str, value: Any, example: str) -> None:
    """`value` must be callable; the sentence shows an `example` of one."""
    if not callable(value):
        raise SpecError(
            f"{owner}: {name} must be a function, found {type(value).__name__}; write for instance {example}."
        )


def require_choice(owner: str, name: str, value: Any, choices: Collection[str]) -> None:
    """`value` must be one of `choices`."""
    if value not in choices:
        raise unknown(f"{owner}: {name}", str(value), choices)


def require_number(owner: str, name: str, value: str) -> None:
    """`value` must be a whole number of at least 1, as text."""
    if not value.isdecimal() or int(value) < 1:
        raise SpecError(f"{owner}: {name} must be a whole number of at least 1, found {value!r}.")
