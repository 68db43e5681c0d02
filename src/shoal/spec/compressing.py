"""The names of compressions, which users write under several strategies."""

from __future__ import annotations

from shoal.errors import SpecError, unknown

COMPRESSIONS = ("none", "bf16", "fp16", "int8", "topk", "randomk", "sign", "powersgd", "zstd")
"""The known names; `topk`, `randomk` and `powersgd` take an argument, `int8` may have one."""


def check_compression(text: str, key: str = "compress", no: str = COMPRESSIONS[0]) -> None:
    """Refuse what names no compression; `key`: where it was written, `no`: what is written there for none."""
    name, colon, argument = text.partition(":")
    if name not in COMPRESSIONS:
        raise unknown(key, name, (no, *COMPRESSIONS[1:]))
    if name in ("topk", "randomk"):
        fraction_of(name, argument, key)
    elif name == "powersgd":
        rank_of(argument, key)
    elif colon and text != "int8:stochastic":
        but = " but stochastic" if name == "int8" else ""
        raise SpecError(f"{key}={name} takes no argument{but}, found {argument!r}; write {key}={name}.")


def fraction_of(name: str, argument: str, key: str = "compress") -> float:
    """The elements that are sent."""
    try:
        fraction = float(argument)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise SpecError(
            f"{key}={name} needs the fraction of elements to send, above 0 and up to 1, found {argument!r}; "
            f"write for instance {name}:0.01."
        )
    return fraction


def rank_of(argument: str, key: str = "compress") -> int:
    """Of the factors of a matrix."""
    if not (argument.isascii() and argument.isdigit() and int(argument)):
        raise SpecError(
            f"{key}=powersgd needs a rank of at least 1, found {argument!r}; write for instance powersgd:4."
        )
    return int(argument)
