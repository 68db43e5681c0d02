"""Who hangs: judged by the beats of all processes and by time. No I/O.

A process is silent when its beats stay out: it is stopped, or something holds Python's lock. It is stuck when it
beats, but its main thread shows no sign of moving while others go on. Both are measured against what is usual for
that process, so that a slow one is left alone. Whoever waits for others shows signs, and is never to blame.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.observe.happenings import Heartbeat, StateEntered
from shoal.spec.told import Told
from shoal.spec.vocabulary import State

LOOK_EVERY_S = 0.25
_QUIET_S = 0.7
"""Three beats were missed."""


def step_of(word: Told) -> int | None:
    """The step that a word is about; None where it is about none."""
    return getattr(word, "step", None)


@dataclass(eq=False)
class Life:
    """What one process has last said of itself."""

    heard_at: float
    phase: State = State.STARTING
    step: int = 0
    still_s: float = 0.0
    """For how long its main thread had shown no sign of moving."""
    p99_s: float | None = None
    """How long it usually goes without one, at most; None where that is not known yet."""
    gap_s: float = 0.0
    """By how much its beats have been late, at most: beyond its will, or because of what it computes."""
    has_beaten: bool = False

    def hear(self, word: Told, now: float) -> None:
        """It has said something."""
        self.heard_at = now
        self.step = max(self.step, step_of(word) or 0)
        match word:
            case StateEntered(state=state):
                self.phase = State.COMPUTING if state == State.TRAINING else state
                self.still_s = 0.0
            case Heartbeat():
                self.has_beaten = True
                self.phase = word.phase or self.phase
                self.still_s = word.still
                self.p99_s = self.p99_s if word.p99 is None else word.p99
                self.gap_s = self.gap_s if word.gap is None else word.gap

    @property
    def is_training(self) -> bool:
        """Whether it takes steps, or waits for those who do."""
        return self.phase in (State.COMPUTING, State.WAITING)

    @property
    def is_saving(self) -> bool:
        """Whether it waits for storage."""
        return self.phase == State.SAVING

    @property
    def usual_s(self) -> float | None:
        """How long it may be expected to go without a sign of moving; None where nobody can tell."""
        return self.p99_s if self.is_training or self.phase == State.SERVING else None


@dataclass(frozen=True)
class Finding:
    """One process hangs."""

    life: Life
    is_silent: bool
    """No beats came; else it beats and does not move."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait before a process counts as hung."""

    least_s: float = 1.0
    most_s: float = 5.0
    """Also the least for a process that nobody's progress can be compared with."""
    unmeasured_s: float = 30.0
    """For silence, where it is not known what is usual: at the start, in an evaluation, for scripts."""
    factor: float = 10.0
    long_factor: float = 5.0
    """Of steps so long that ten of them are more than `most_s`: whoever is slower by four must not be ended."""

    @property
    def long_silence_s(self) -> float:
        """For missing beats, where there may be an excuse."""
        return min(self.most_s, self.unmeasured_s)

    def silence_s(self, life: Life) -> float:
        """For missing beats of this process, all others being well."""
        if life.usual_s is None:
            return self.unmeasured_s
        usual = min(max(self.factor * life.usual_s, self.least_s), self.most_s)
        return min(max(usual, 2 * life.gap_s), self.unmeasured_s)

    def stillness_s(self, p99_s: float) -> float:
        """For a process that does not move while others go on."""
        longest = max(self.most_s, self.long_factor * p99_s)
        return max(self.least_s, min(self.factor * p99_s, longest))

    def stillness_alone_s(self, p99_s: float) -> float:
        """For a process that does not move, where no other worker does either."""
        return max(self.most_s, self.factor * p99_s)


class HangJudge:
    """Looks at all processes of a run a few times a second."""

    def __init__(self, patience: Patience | None = None) -> None:
        self._patience = patience or Patience()
        self._looked_at: float | None = None

    def next_look(self) -> float | None:
        """When `look` must be called at the latest."""
        return None if self._looked_at is None else self._looked_at + LOOK_EVERY_S

    def look(self, lives: Sequence[Life], now: float) -> list[Finding]:
        """Who of these hangs."""
        self._forgive_own_delay(lives, now)
        silent = list(self._silent(lives, now))
        if silent:
            return silent
        return [
            Finding(life, is_silent=False, seconds=life.still_s) for life in lives if self._is_stuck(life, lives)
        ]

    def _forgive_own_delay(self, lives: Iterable[Life], now: float) -> None:
        """Time in which the judge itself did not run says nothing about others: their words lie unread."""
        held_up_s = 0.0 if self._looked_at is None else now - self._looked_at - LOOK_EVERY_S
        self._looked_at = now
        if held_up_s > LOOK_EVERY_S:
            for life in lives:
                life.heard_at = min(now, life.heard_at + held_up_s)

    def _silent(self, lives: Sequence[Life], now: float) -> Iterable[Finding]:
        beating = [life for life in lives if life.has_beaten]
        quiet = sum(now - life.heard_at >= _QUIET_S for life in beating)
        is_machine = quiet == len(beating) > 1
        is_common = quiet > 1 or len(beating) == 1
        # Who trains and has not yet told what is usual, while others have, began to hang with its first steps.
        others_train = any(life.is_training and life.usual_s is not None for life in lives)
        for life in lives:
            limit_s = self._patience.silence_s(life)
            if is_machine:
                limit_s = self._patience.unmeasured_s
            elif is_common:
                limit_s = max(limit_s, self._patience.long_silence_s)
            elif life.usual_s is None and (life.phase == State.SERVING or (life.is_training and others_train)):
                limit_s = self._patience.long_silence_s
            if now - life.heard_at >= limit_s:
                yield Finding(life, is_silent=True, seconds=now - life.heard_at)

    def _is_stuck(self, life: Life, lives: Sequence[Life]) -> bool:
        if life.usual_s is None or life.phase == State.WAITING:
            return False
        alone_s = self._patience.stillness_alone_s(life.usual_s)
        if not life.is_training:  # It serves: how long one of its doings takes differs widely.
            return life.still_s >= alone_s
        go_on = any(
            other.phase == State.WAITING or other.still_s <= life.still_s / 2
            for other in lives
            if other is not life and other.is_training
        )
        return life.still_s >= (self._patience.stillness_s(life.usual_s) if go_on else alone_s)
