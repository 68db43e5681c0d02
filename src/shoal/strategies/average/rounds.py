"""Steps that workers take on their own: what each came to over all of them is known when they speak next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.spec.averaging_footprint import TOLD_BESIDE
from shoal.spec.task import MOST_LOSS_PARTS
from shoal.step.compute import Sums, check_weight
from shoal.step.work import Work
from shoal.strategies.base import StepResult, step_result

_SUMS = len(Sums().values)
_FLAGS = TOLD_BESIDE

Speak = Callable[[Mapping[int, Mapping[int, torch.Tensor]]], torch.Tensor]
"""Takes, by step and worker, what this process tells; returns, step by step, the sums of what all tell."""


@dataclass(frozen=True)
class OwnStep:
    """What one worker's own step came to."""

    result: StepResult
    slots: tuple[int, ...]

    @classmethod
    def of(cls, result: StepResult, work: Work) -> OwnStep:
        """With the slots that it was for."""
        return cls(result, tuple(part.slot for part in work.parts))


class StepOfRound:
    """A step that this process has taken; a commit."""

    def __init__(self, own: Mapping[int, OwnStep], work: Work, settle: Callable[[], None]) -> None:
        self.own = dict(own)
        """By worker, of whose places a process may have several."""
        self.work = replace(work, parts=(), all_parts=None)  # what was read of the data is not to stay
        self._settle = settle
        self._result: StepResult | None = None

    @property
    def is_known(self) -> bool:
        """Whether all have spoken since."""
        return self._result is not None

    def resolve(self, result: StepResult) -> None:
        """All have spoken."""
        self._result = result

    def result(self) -> StepResult:
        """All speak now, where they have not: whoever asks does so in the same step as all others."""
        if self._result is None:
            self._settle()
        assert self._result is not None
        return self._result


class Rounds:
    """The steps since all have spoken last, and what workers count since they have agreed."""

    def __init__(self, size: int, slots: int, speak: Speak) -> None:
        """`speak`: tells what this process has to say of each step, by worker; the sums of what all have said."""
        self._slots = slots
        self._speak = speak
        self._open: list[StepOfRound] = []
        self.weights = torch.zeros(size, dtype=torch.float64)
        """By worker: what its steps count that were taken since the last agreement, as far as all have spoken."""
        self.names: Callable[[], Sequence[str]] = tuple
        self.facts: Callable[[], Mapping[str, Any]] = dict
        self.note: Callable[[int, StepResult], None] = lambda step, result: None
        """Told of every step when all have spoken of it."""
        self.is_last = False
        """Whether somebody asked, when all spoke last, that this be the end."""

    def add(self, own: Mapping[int, OwnStep], work: Work) -> StepOfRound:
        """This process has taken a step."""
        self._open.append(StepOfRound(own, work, self.settle))
        return self._open[-1]

    def put(self, step: int, worker: int, own: OwnStep) -> None:
        """A worker whose place this process has now has taken a step, too, of which it may not have spoken."""
        for each in self._open:
            if each.work.step == step:
                each.own[worker] = own

    @property
    def shares(self) -> torch.Tensor | None:
        """By worker: its share of all that was trained on since the last agreement; None where that is nothing."""
        total = self.weights.sum()
        return self.weights / total if total > 0 else None

    def settle(self) -> None:
        """All tell each other what they have done since they spoke last. All call this in the same step."""
        if not self._open:
            return
        table = self._speak({step.work.step: self._rows(step) for step in self._open})
        sums, flags, weights, counts = table.split([_SUMS, _FLAGS, len(self.weights), self._slots], dim=1)
        self.weights += weights.sum(0)
        stop, save = (bool(flag) for flag in flags.sum(0).tolist())
        self.is_last = stop
        last = self._open[-1]
        for step, values, used in zip(self._open, sums.tolist(), counts.tolist(), strict=True):
            check_weight(step.work, sums_of_all := Sums.of(values))
            found = step_result(sums_of_all, stop=False, counts=[int(count) for count in used], names=self.names())
            # Who asks in the middle of a round is heard when all speak.
            step.resolve(
                replace(found, stop=stop and step is last, save=save and step is last, facts=self.facts())
            )
            self.note(step.work.step, found)
        self._open = []

    def _rows(self, step: StepOfRound) -> dict[int, torch.Tensor]:
        return {worker: self._row(worker, own, step) for worker, own in step.own.items()}

    def _row(self, worker: int, own: OwnStep, step: StepOfRound) -> torch.Tensor:
        """What a worker tells of a step."""
        weights, counts = torch.zeros_like(self.weights), torch.zeros(self._slots, dtype=torch.float64)
        weights[worker] = own.result.weight
        for slot, count in zip(own.slots, own.result.counts, strict=True):
            counts[slot] = count
        head = [*_sums_of(own.result).values, float(step.work.stop), float(step.work.save)]
        return torch.cat([torch.tensor(head, dtype=torch.float64), weights, counts])


def _sums_of(own: StepResult) -> Sums:
    """What a step of one process told as means, as sums."""
    total = own.weight + own.skipped
    if not total:
        return Sums()
    parts = tuple(part * total for part in own.parts.values())[:MOST_LOSS_PARTS]
    return Sums(own.loss * total, own.weight, own.skipped, float(own.skipped_parts), float(sum(own.counts)), parts)
