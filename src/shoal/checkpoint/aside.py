"""What a strategy keeps besides the model and its optimizer, such as heads that only training needs.

It lies among the optimizer's tensors, under a prefix that no parameter has. Whoever goes on with another strategy
leaves it out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")

_PREFIX = "aside/"


def put_aside(tensors: Mapping[str, T]) -> dict[str, T]:
    """The same under names that are no parameter's."""
    return {_PREFIX + name: tensor for name, tensor in tensors.items()}


def split_aside(tensors: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """The optimizer's own, and what was put aside, by the names that it had."""
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(_PREFIX)}
    aside = {name.removeprefix(_PREFIX): tensors[name] for name in tensors if name not in own}
    return own, aside


def count_aside(names: Iterable[str]) -> dict[str, int]:
    """How many of these were put aside, by the first word of the names that they had."""
    return Counter(name.split("/")[1] for name in names if name.startswith(_PREFIX))
