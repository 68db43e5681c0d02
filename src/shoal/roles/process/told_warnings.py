"""Python's warnings, told to whoever watches the run: nobody reads a worker's log while all goes well."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_SHOAL = f"{Path(__file__).resolve().parents[2]}/"
_MOST_LETTERS = 300


@contextmanager
def warnings_told(tell: Callable[[str], None]) -> Iterator[None]:
    """Tell each warning of torch's or of the task's once while the block runs; the log has all of them."""
    show_in_log, told, pid = warnings.showwarning, set[str](), os.getpid()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        show_in_log(message, category, filename, lineno, file, line)
        text = _one_line(f"{category.__name__}: {message}")
        # What our own code is warned of is no news for a user; who is forked from here has no line to tell it on.
        if text not in told and not filename.startswith(_SHOAL) and os.getpid() == pid:
            told.add(text)
            tell(f"{text} ({_short(filename)}:{lineno})")

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = show_in_log


def _one_line(text: str) -> str:
    line = " ".join(text.partition("(Triggered internally at")[0].split())
    return line if len(line) <= _MOST_LETTERS else f"{line[:_MOST_LETTERS]}…"


def _short(filename: str) -> str:
    """`torch/nn/modules/transformer.py` for one of an installed package; others as they are."""
    return filename.rpartition("/site-packages/")[2]
