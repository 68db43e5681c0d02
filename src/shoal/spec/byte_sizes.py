"""Sizes of memory as people write them: `1.5GiB`, `800MB`."""

from __future__ import annotations

import re

from shoal.errors import SpecError

_UNITS = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def parse_bytes(owner: str, name: str, text: str) -> int:
    """How many bytes a text such as `1.5GiB` means."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip(), re.ASCII)
    unit = None if found is None else _UNITS.get(found[2])
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise SpecError(
            f"{owner}: {name} must be a size such as 1.5GiB or 800MB, found {text!r}; the units are "
            f"{', '.join(_UNITS)}."
        )
    return int(float(found[1]) * unit)
