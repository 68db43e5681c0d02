"""`Shipped`: a data set that one process of a run holds and sends to the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.spec.checks import require_callable


class Shipped:
    """A data set that only the first worker makes; the others get their samples from it as they need them.

    Samples may be tensors, numpy arrays, numbers and texts, in tuples, lists and dicts. A sample must be the same
    each time it is read: what is random belongs into the task's `collate`, which runs where the batch is used.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        require_callable("Shipped", "make", make, "Shipped(lambda: ImageFolder('images'))")
        self._make = make

    def __call__(self) -> Any:
        """The data set itself, made here and now."""
        return self._make()
