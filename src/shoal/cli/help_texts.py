"""Help texts that fit a terminal of any width."""

from __future__ import annotations

import inspect


def flowing(docstring: str) -> str:
    """A docstring whose sentences the terminal alone breaks; examples, which end in no full stop, keep lines."""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(each.replace("\n", " ") if each.endswith(".") else each for each in paragraphs)
