"""`Callback`: code of the user's that a run calls when something happens, once for each event of the job."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from shoal.errors import SpecError


class Wish(Enum):
    """What a callback may ask of its run."""

    STOP = "stop"
    SAVE = "save"
    EVALUATE = "evaluate"


@dataclass(frozen=True, kw_only=True)
class Mishap:
    """Something went wrong with a process of the run, which goes on."""

    kind: str
    """`lost`: others go on without the process, or another follows it; `restarted`: all began again from the
    newest checkpoint."""
    who: str
    """`worker 1`."""
    reason: str


@dataclass(kw_only=True)
class CallbackContext:
    """Where the job stands, and what can be asked of it. It is the same object in every call."""

    folder: Path | None = None
    """The run's folder; None where there is none, as in a `Trainer`."""
    total_steps: int = 0
    step: int = 0
    """The last step that was told."""
    epoch: int = 0
    """Its epoch, from 1."""
    loss: float = math.nan
    """Its loss, over the whole batch."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The numbers that its loss was told with, where that is a dict; none of a step that is replayed."""
    lr: float = math.nan
    """Its learning rate."""
    samples: int = 0
    """Trained on so far."""
    results: Mapping[str, float] = field(default_factory=dict)
    """Of the last evaluation: `loss`, and the task's metrics."""
    best: Path | None = None
    """The file of the best model so far, where the task keeps one."""
    wishes: set[Wish] = field(default_factory=set)
    """What was asked for, and is not yet on its way."""
    logged: list[tuple[str, Any]] = field(default_factory=list)
    """What is to be logged, and is not yet on its way."""

    def log(self, name: str, value: Any) -> None:
        """Log a number, a text or an image under the present step.

        An image has height × width, with 1, 3 or 4 channels first or last: whole numbers up to 255, or fractions.
        """
        self.logged.append((name, value))

    def stop(self) -> None:
        """Let the run end after its next step, as Ctrl-C would, but as a run that has come to its end."""
        self.wishes.add(Wish.STOP)

    def save(self) -> None:
        """Let the training state be saved after the next step."""
        self.wishes.add(Wish.SAVE)

    def evaluate(self) -> None:
        """Let the model be evaluated after the next step."""
        self.wishes.add(Wish.EVALUATE)


class Callback:
    """Override what you want to hear of.

    The first worker calls, in the order in which things were committed. An event that is replayed, by who takes a
    dead worker's place or after all began again, is told once. One in the middle of which the process was killed
    is not told again.
    """

    fatal = False
    """Whether an exception in it ends the run; else it is named in a warning, and the run goes on."""

    def on_start(self, context: CallbackContext) -> None:
        """Training begins, or goes on because the user resumed it."""

    def on_step(self, context: CallbackContext) -> None:
        """A step is done."""

    def on_evaluation(self, context: CallbackContext) -> None:
        """The model was evaluated; `context.results` says what came out."""

    def on_checkpoint(self, context: CallbackContext, path: Path) -> None:
        """A training state is on disk; steps may have been done while it was written."""

    def on_best(self, context: CallbackContext, path: Path) -> None:
        """The model that was evaluated is the best so far, and lies in this file (`keep_best`)."""

    def on_fault(self, context: CallbackContext, mishap: Mishap) -> None:
        """A process was lost, or all began again."""

    def on_end(self, context: CallbackContext, reason: str) -> None:
        """Training is over, and the model is saved: it has `finished`, come to a `plateau`, or was `stopped`."""


def check_callbacks(callbacks: Any) -> None:
    """They are objects of classes that derive from `Callback`."""
    if not isinstance(callbacks, list | tuple):
        raise SpecError(f"Task: callbacks is a list, found {type(callbacks).__name__}; write callbacks=[…].")
    for each in callbacks:
        if not isinstance(each, Callback):
            found = each.__name__ if isinstance(each, type) else type(each).__name__
            raise SpecError(
                f"Task: callbacks are objects of classes that derive from shoal.Callback, found {found}; write "
                "for instance callbacks=[MyCallback()]."
            )
