"""What a task's loss is told with, where it returns a dict: `{"loss": …, "ce": …, "kl": …}`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from shoal.errors import TaskError
from shoal.spec.task import MOST_LOSS_PARTS


class LossParts:
    """The names of these numbers, as the first dict has them; so they travel as bare numbers, in its order."""

    def __init__(self, taken: Collection[str]) -> None:
        """`taken`: names that something else is told by."""
        self._taken = taken
        self.names: tuple[str, ...] = ()
        """None until a loss was computed here, or others have told."""
        self.are_common = False
        """Whether all processes have agreed on them."""

    def learn(self, names: Sequence[str]) -> None:
        """All know these now."""
        self.names, self.are_common = tuple(names), True

    def of(self, found: Any) -> tuple[Any, ...]:
        """The numbers beside the loss, in the order of the names."""
        told = [name for name in found if name != "loss"] if isinstance(found, Mapping) else []
        if not self.names and told:
            self._check(told)
            self.names = tuple(told)
        if set(told) != set(self.names):
            raise TaskError(
                f"Task: the loss came with {_listed(self.names)} at first and now with {_listed(told)}; let it "
                "return the same names for every batch."
            )
        return tuple(_number(name, found[name]) for name in self.names)

    def _check(self, names: Sequence[str]) -> None:
        if len(names) > MOST_LOSS_PARTS:
            raise TaskError(
                f"Task: the loss may be told with {MOST_LOSS_PARTS} numbers beside itself, found {len(names)}: "
                f"{_listed(names)}; leave some out."
            )
        for name in names:
            if not isinstance(name, str) or name in self._taken:
                why = "is a metric's name, too" if name in self._taken else "is no text"
                raise TaskError(f"Task: the loss is told with {name!r}, which {why}; give it another name.")


def _number(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach()
    if isinstance(value, (int, float)):
        return float(value)
    found = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise TaskError(
        f"Task: what the loss is told with must be one number each, found {found} for {name!r}; take its mean "
        "over the batch, or leave it out."
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(str, names)) or "nothing else"
