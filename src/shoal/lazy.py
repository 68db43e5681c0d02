"""Names that a package offers and finds on first use, so that importing it is quick."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def found_in(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`: each name comes from the module of the package that `homes` gives for it.

    A name whose home has the same name is that module itself.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{homes[name]}")
        return module if homes[name] == name else getattr(module, name)

    return find
