"""Callbacks are told of everything that happens to the job: each thing once, in its order, by the first worker.

Every process notes what happens, because any may become the first; marks that all of them share say what was told
already. A mark is set before its call: who is killed inside one has told it, as far as that went.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.errors import TaskError
from shoal.ledger import Schedule
from shoal.observe.checkpoint_names import folder_name, step_folders, step_of
from shoal.observe.happenings import Happening, ImageLogged, ScalarsLogged, TextLogged
from shoal.observe.run_folder import RunFolder
from shoal.observe.told_marks import MOST_ASKED, Mark, ToldMarks
from shoal.roles.callbacks.mishaps import MishapReader
from shoal.roles.callbacks.pictures import write_picture
from shoal.spec.callback import Callback, CallbackContext, Wish

MOST_NOTED = 64
"""What a process remembers in case that it becomes the first; no worker is so far ahead of what was told."""
_HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


@dataclass(frozen=True, kw_only=True)
class Outlet:
    """Where that goes which callbacks say, and what comes of them."""

    say: Callable[[str], None] = print
    warn: Callable[[str], None] = print
    log: Callable[[Happening], None] = lambda told: None
    unsent: Callable[[], Sequence[Happening]] = tuple
    """What a process before this one has logged, and was killed before it could tell anybody."""
    at_work: Callable[[], AbstractContextManager[None]] = nullcontext
    """While it is entered, the user's own code runs."""


def _overrides(callback: Callback, hook: str) -> bool:
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)


class _Note(NamedTuple):
    """One thing to tell."""

    mark: Mark
    at: int
    """What the mark is, once it was told."""
    hook: str
    facts: Mapping[str, Any]
    """What the context says from then on."""
    about: tuple[Any, ...] = ()
    """What the hook is given besides the context."""


class Callbacks:
    """One process's part in telling the task's callbacks."""

    def __init__(
        self,
        callbacks: Sequence[Callback],
        marks: ToldMarks,
        schedule: Schedule,
        outlet: Outlet,
        *,
        is_first: Callable[[], bool],
        in_lockstep: bool = True,
        start_step: int = 0,
        folder: RunFolder | None = None,
        impossible: Mapping[Wish, str] | None = None,
    ) -> None:
        """`impossible`: by wish, why this run cannot do it."""
        self.marks = marks
        self._hearers = {hook: [one for one in callbacks if _overrides(one, hook)] for hook in _HOOKS}
        self._schedule = schedule
        self._outlet = outlet
        self._is_first = is_first
        self._in_lockstep = in_lockstep
        self._start_step = self._taken = start_step
        self._folder = folder
        self._impossible = impossible or {}
        self._refused: set[Wish] = set()
        self._context = CallbackContext(total_steps=schedule.total_steps, step=start_step)
        if folder is not None:
            self._context.folder = folder.path
            self._context.best = folder.best_model if folder.best_model.is_file() else None
        self._mishaps = None if folder is None else MishapReader(folder.events)
        self._notes: deque[_Note] = deque(maxlen=MOST_NOTED)
        self._written: deque[int] = deque()
        """Steps whose checkpoints are on disk, and were not told of yet."""
        self._failures: Counter[str] = Counter()
        self._has_begun = False
        """Whether this process has told anything."""

    # What happens.

    def begin(self, step: int) -> None:
        """Training begins after this step, or this process goes on for another."""
        self._taken = max(self._taken, step)
        self._tell_all()

    def begin_turn(self, step: int) -> bool:
        """This process is about to take part in this step; whether it is to say when an evaluation is made, which
        was wanted since the last."""
        self._taken = max(self._taken, step)
        return bool(self.marks[Mark.WANTED]) and self._is_first()

    def step_is_done(
        self, step: int, loss: float, learning_rate: float, parts: Mapping[str, float] | None = None
    ) -> None:
        """A step is committed; `parts`: what its loss was told with."""
        facts = {
            "step": step,
            "loss": loss,
            "parts": parts or {},
            "lr": learning_rate,
            "epoch": self._schedule.epoch_of(step) + 1,
            "samples": self._schedule.samples_after(step),
        }
        self._notes.append(_Note(Mark.STEP, step, "on_step", facts))
        self._tell_all()

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """The model was evaluated after a step."""
        self._notes.append(_Note(Mark.EVALUATION, step, "on_evaluation", {"results": dict(results)}))
        self._tell_all()

    def best_is_kept(self, step: int, path: Path) -> None:
        """The model after this step is the best so far, and is on disk."""
        self._notes.append(_Note(Mark.BEST, step, "on_best", {"best": path}, (path,)))
        self._tell_all()

    def checkpoint_is_written(self, step: int) -> None:
        """A training state is on disk; said by the thread that writes, and told after the next step."""
        self.marks.raise_to(Mark.WRITTEN, step)
        self._written.append(step)

    def end(self, reason: str) -> None:
        """All is over, and the model is saved."""
        if self._is_first():
            self._tell_all()
            self._tell_mishaps()
            self._tell(_Note(Mark.ENDED, 1, "on_end", {}, (reason,)))
            for name, count in self._failures.items():
                if count > 1:
                    self._outlet.warn(f"callback {name} failed {count} times in all")
        if self._mishaps is not None:
            self._mishaps.close()

    # What was asked for, as every process of the run reads it.

    def ask_evaluation(self, step: int) -> None:
        """Let all evaluate after this step, too, which nobody can have gone past."""
        if not self.marks.ask_evaluation(min(step, self._schedule.total_steps)):
            self._refuse(Wish.EVALUATE, f"a run makes at most {MOST_ASKED} besides those that it plans")
        self.marks[Mark.WANTED] = 0  # not before: who is killed in between leaves it to who follows

    def is_stop_due(self, step: int) -> bool:
        """Whether this step is to be the last."""
        return 0 < self.marks[Mark.STOP] <= step

    @property
    def wants_stop(self) -> bool:
        """Whether the run is to end with the step that this process is in; where each is in another, the first has
        to tell all."""
        return self._in_lockstep and self.is_stop_due(self._taken)

    @property
    def stop_was_asked(self) -> bool:
        """Whether a callback has asked for the end, in whichever process."""
        return self.marks[Mark.STOP] > 0

    def is_save_due(self, step: int, last_saved: int) -> bool:
        """Whether the state after this step is to be saved, which that of the last one saved is no answer to."""
        return last_saved < self.marks[Mark.SAVE] <= step

    # How it is told.

    def _tell_all(self) -> None:
        """Tell what was noted, where this process is the one to do so."""
        if not self._is_first():
            return
        if not self._has_begun:
            self._begin()
        while self._notes:
            self._tell(self._notes.popleft())
        while self._written:
            self._tell_checkpoint(self._written.popleft())
        if self._mishaps is not None and self._mishaps.is_due():
            self._tell_mishaps()

    def _begin(self) -> None:
        """Go on where others were, or at the beginning."""
        self._has_begun = True
        marks, before = self.marks, self._start_step
        for mark in (Mark.STEP, Mark.EVALUATION):
            marks.raise_to(mark, before)
        if not marks[Mark.STARTED]:
            for mark in (Mark.CHECKPOINT, Mark.WRITTEN):
                marks.raise_to(mark, before)
        if marks[Mark.INSIDE]:
            marks[Mark.INSIDE] = 0
            self._outlet.warn(
                f"a worker was ended inside a callback, after step {marks[Mark.STEP]:,}; what that was told of is "
                "not told again"
            )
        for told in self._outlet.unsent():
            self._outlet.log(told)
        self._tell(_Note(Mark.STARTED, 1, "on_start", {}))
        if self._folder is not None and marks[Mark.WRITTEN] > marks[Mark.CHECKPOINT]:
            for path in step_folders(self._folder.checkpoints):
                if (step := step_of(path) or 0) <= marks[Mark.WRITTEN]:
                    self._tell_checkpoint(step)

    def _tell_checkpoint(self, step: int) -> None:
        if self._folder is not None:
            path = self._folder.checkpoints / folder_name(step)
            self._tell(_Note(Mark.CHECKPOINT, step, "on_checkpoint", {}, (path,)))

    def _tell_mishaps(self) -> None:
        if self._mishaps is None:
            return
        for offset, mishap in self._mishaps.after(self.marks[Mark.FAULT]):
            if mishap is None:
                self.marks.raise_to(Mark.FAULT, offset)
            else:
                self._tell(_Note(Mark.FAULT, offset, "on_fault", {}, (mishap,)))

    def _tell(self, note: _Note) -> None:
        for name, value in note.facts.items():
            setattr(self._context, name, value)
        marks = self.marks
        if note.at <= marks[note.mark]:
            return
        marks[note.mark] = note.at
        if hearers := self._hearers[note.hook]:
            marks[Mark.INSIDE] = 1
            with self._outlet.at_work():
                for callback in hearers:
                    self._call(callback, note)
            marks[Mark.INSIDE] = 0

    def _call(self, callback: Callback, note: _Note) -> None:
        context, name = self._context, f"{type(callback).__name__}.{note.hook}"
        try:
            getattr(callback, note.hook)(context, *note.about)
            while context.logged:
                self._log(*context.logged.pop(0))
        except Exception as error:
            context.logged.clear()
            self._complain(name, error, is_fatal=callback.fatal)
        while context.wishes:
            self._heed(context.wishes.pop(), name)

    def _complain(self, name: str, error: Exception, *, is_fatal: bool) -> None:
        """Name what a callback raised, the first time; go on, unless it says otherwise."""
        what = f"callback {name} failed after step {self._context.step:,}: {type(error).__name__}: {error}"
        if is_fatal:
            raise TaskError(f"Task: {what} (its class says fatal = True, so the run ends).") from error
        self._failures[name] += 1
        if self._failures[name] == 1:
            self._outlet.warn(f"{what}; the run goes on, and it is called again")

    def _log(self, name: str, value: Any) -> None:
        step = self._context.step
        if isinstance(value, str):
            self._outlet.log(TextLogged(name=name, text=value, step=step))
        elif isinstance(value, int | float) or np.ndim(value) == 0:
            self._outlet.log(ScalarsLogged(scalars=[[step, name, float(value)]]))
        elif self._folder is not None:
            path = write_picture(self._folder.images, name, step, value)
            self._outlet.log(ImageLogged(name=name, path=str(path.relative_to(self._folder.path)), step=step))

    def _heed(self, wish: Wish, name: str) -> None:
        """Let a wish take its way: from the next step on, which nobody can have committed without this process."""
        if wish in self._impossible:
            self._refuse(wish, self._impossible[wish])
        elif wish is Wish.EVALUATE:
            self.marks[Mark.WANTED] = 1
        elif wish is Wish.SAVE:
            self.marks[Mark.SAVE] = self._taken + 1
        elif not self.marks[Mark.STOP]:
            self.marks[Mark.STOP] = self._taken + 1
            self._outlet.say(f"callback {name} asked to stop after step {self._context.step:,}")

    def _refuse(self, wish: Wish, why: str) -> None:
        """Say, once, why what a callback asks for is left out."""
        if wish not in self._refused:
            self._refused.add(wish)
            self._outlet.warn(f"a callback asks to {wish.value}, which is left out: {why}")
