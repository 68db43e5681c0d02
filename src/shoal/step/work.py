"""What one process is to do next, and with what."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shoal.feed.parts import Part


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What comes next for one process, as its strategy says."""

    step: int
    """The step that it has a part in; of several, the last."""
    first: int | None = None
    """Of several, the first."""
    is_border: bool = False
    """Nothing is trained: all stand still after this step, and the first worker saves what there is."""
    coming: Iterable[tuple[int, int]] | None = None
    """Steps and slots that it reads now and is likely to read next; None: its own slots, step by step."""


@dataclass(frozen=True)
class Work:
    """What one process does in one turn."""

    step: int
    parts: tuple[Part, ...]
    seed: int
    """With step and slot it decides every random number, whoever draws it."""
    stop: bool = False
    """This process asks that the step be the last."""
    save: bool = False
    """This process asks that the state be saved after the step; where it cannot do so without the others."""
    all_parts: Callable[[], tuple[Part, ...]] | None = None
    """The parts of all slots, for optimizers that evaluate the loss again within a step."""
    turn: Turn | None = None
    """What the strategy has asked for."""
    enough: str = ""
    """Why this process, which alone evaluates, has found that training may end."""
