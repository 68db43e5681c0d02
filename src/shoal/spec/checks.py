"""The few checks that every spec repeats, each with the same three-part sentence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, TypeVar

from shoal.errors import SpecError, unknown

Spec = TypeVar("Spec")


def knows_its_names(kind: type[Spec]) -> type[Spec]:
    """A dataclass that answers a misspelt keyword with the one that was meant."""
    made: Callable[..., None] = vars(kind)["__init__"]
    _, *names = inspect.signature(made).parameters

    @wraps(made)
    def check_names(self: Spec, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in names:
                raise unknown(f"{kind.__name__}: keyword", name, names)
        made(self, *args, **given)

    type.__setattr__(kind, "__init__", check_names)
    return kind


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


def require_maker(owner: str, name: str, value: Any, example: str) -> None:
    """`value` must be a function that makes a module, not a module itself, though that can be called, too."""
    if hasattr(value, "parameters") and not isinstance(value, type):
        kind = type(value).__name__
        raise SpecError(
            f"{owner}: {name} must be a function that makes the {name}, found a {kind} that is made already; "
            f"write {name}=lambda: {kind}(…), so that every process makes its own, from the same seed."
        )
    require_callable(owner, name, value, example)


def require_choice(owner: str, name: str, value: Any, choices: Collection[str]) -> None:
    """`value` must be one of `choices`."""
    if value not in choices:
        raise unknown(f"{owner}: {name}", str(value), choices)


def require_number(owner: str, name: str, value: str) -> None:
    """`value` must be a whole number of at least 1, as text."""
    if not value.isdecimal() or int(value) < 1:
        raise SpecError(f"{owner}: {name} must be a whole number of at least 1, found {value!r}.")
