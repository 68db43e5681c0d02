"""Which strategies to compare: those that are named, or the usual ones."""

from __future__ import annotations

from importlib.metadata import entry_points

from shoal.spec import parse_strategy
from shoal.spec.strategy import ENTRY_POINTS, known_strategies

USUAL = ("data", "ps", "ps:sync=asp", "sharded", "tensor", "pipeline", "layer")
"""Each strategy as it is without keys, and servers without lockstep. A mesh needs sizes, so it must be named."""


def chosen_strategies(text: str | None) -> list[str]:
    """The strategies of a list, each in its shortest form; without a list the usual ones and what others bring."""
    named = [*USUAL, *sorted(entry_points(group=ENTRY_POINTS).names)] if text is None else split_strategies(text)
    return list(dict.fromkeys(str(parse_strategy(written)) for written in named))


def split_strategies(text: str) -> list[str]:
    """`data,ps:servers=2,sync=asp` names two: a comma also parts the keys of one, and what some keys hold."""
    known = set(known_strategies())
    found: list[str] = []
    for piece in text.split(","):
        name = piece.partition(":")[0].strip()
        has_keys = bool(found) and ":" in found[-1]
        if has_keys and name not in known:
            found[-1] += f",{piece.strip()}"
        else:
            found.append(piece.strip())
    return found
