"""Who follows a training loop from outside, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.roles.training.hosting import MoveOrder
from shoal.spec import World
from shoal.spec.vocabulary import State
from shoal.strategies.base import StepResult


class Observer(Protocol):
    """Who wants to know how the run goes, and may ask it to stop."""

    def on_state(self, state: State, step: int) -> None: ...

    def on_step(
        self,
        step: int,
        result: StepResult,
        samples: int,
        learning_rate: float,
        epoch: int,
        *,
        committed: int | None = None,
        more: bool = False,
    ) -> None:
        """A step is done; `committed`: the samples of all workers, where they do not go in step with this one;
        `more`: the next step is told right after it, for what that came to is known, too."""

    def on_taken(self, step: int) -> None:
        """This process has done its part of a step; what that came to is known later."""

    def on_turn(self) -> None:
        """A turn was taken that brought the run no further."""

    def on_evaluation(
        self, step: int, results: dict[str, float], by_client: dict[str, list[Any]] | None = None
    ) -> None:
        """`by_client`: the same of each client, where they hold samples back."""

    def wants_stop(self) -> bool: ...

    def take_orders(self, *, at_border: bool) -> Iterable[MoveOrder]:
        """Places that come or go now; inside a step they only come."""

    def on_moved(self, order: MoveOrder, world: World | None) -> None:
        """An order has been carried out; None: no place is left to this process."""


@dataclass(frozen=True)
class Outcome:
    """How a training run ended, the same on every worker."""

    step: int
    loss: float
    results: dict[str, float]
    reason: str
    """`finished`, `plateau`, `stopped`, or `released`: others go on without this process."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the strategy has to say besides."""
