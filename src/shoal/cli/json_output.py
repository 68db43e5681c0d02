"""What `--json` prints."""

from __future__ import annotations

from typing import Any


def print_json(value: Any, indent: int | None = None) -> None:
    """One JSON value on standard output that every reader takes."""
    # Imported here: the command line must be there at once.
    from shoal.observe.strict_json import to_json

    print(to_json(value, indent=indent))
