"""Several places of one process: they have its replica in turn, and each takes the steps that it would alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from shoal.checkpoint.model_stream import TensorStream
from shoal.model.replica import Replica
from shoal.step.work import Work
from shoal.strategies.average.common_replica import CommonReplica
from shoal.strategies.average.rounds import OwnStep, StepOfRound
from shoal.strategies.average.strategy import AveragedModel
from shoal.strategies.average.team import Team


class PlacesInTurn(AveragedModel):
    """Which of a process's places has the replica, and how far each is."""

    _common: CommonReplica
    _own: StepOfRound
    _taken: dict[int, int]
    """By place of this process: the last step that it has taken."""
    _under_way: dict[int, OwnStep]
    """What places have come to in a step that others of this process have not taken yet."""
    _rates: dict[int, list[dict[str, Any]]]
    """By step that may have to be taken again: what the scheduler had made of the optimizer's settings."""

    def _have_none(self, replica: Replica) -> None:
        """No place has the replica yet."""
        self._common = CommonReplica(replica)
        self._taken, self._under_way, self._rates = {}, {}, {}

    @property
    def _places(self) -> tuple[int, ...]:
        return self._setting.world.places

    def _take_all(self, work: Work) -> None:
        """Take a step with every place."""
        # Who had the replica last begins: that saves a change.
        for place in sorted(self._places, reverse=self._common.owner == self._places[-1]):
            if self._taken[place] < work.step:
                self._under_way[place] = self._take_one(place, work)
        if self._replica.scheduler is not None:
            self._rates[work.step] = self._common.settings()
        self._own = self._rounds.add(self._under_way, work)
        self._under_way = {}
        self._step, self._is_apart = work.step, True

    def _take_one(self, place: int, work: Work) -> OwnStep:
        """A place's own step."""
        self._turn_to(place)
        slots = self._setting.slots_of(place)
        own = replace(work, parts=tuple(part for part in work.parts if part.slot in slots))
        with nullcontext() if self._common.moved is None else self._common.moved.watching():
            found = self._take_alone(own)
        self._taken[place] = work.step
        return OwnStep.of(found, own)

    def _catch_up(self, place: int) -> None:
        """Take the steps again that a place has taken since, as far as this process has come."""
        supply = self._setting.supply
        for step in range(self._taken[place] + 1, self._step + 1):
            assert supply is not None, "who takes places over in the middle of a run can ask for its data"
            self._block()  # this may take longer than any step
            with self._as_after(step):
                own = self._take_one(place, supply.work(step, self._setting.slots_of(place)))
            self._rounds.put(step, place, own)

    @contextmanager
    def _mean_in_use(self) -> Iterator[None]:
        self._turn_to(self._places[0])  # who has the replica after all have met
        with super()._mean_in_use():
            yield

    def model_stream(self, replica: Replica) -> TensorStream:
        self._turn_to(self._places[0])
        return super().model_stream(replica)

    def _have(self, place: int, step: int) -> None:
        """The replica is this place's, which has come to a step."""
        self._common.become(place)
        self._taken[place] = step
        self._take_beside(None)

    def _turn_to(self, place: int) -> None:
        """Let a place of this process have the replica."""
        if self._common.owner == place:
            return
        self._common.put_aside(self._beside())
        self._take_beside(self._common.return_to(place))
        self._index, self._team = place, Team(number=place, count=self._size)

    def _beside(self) -> Any:
        """What is kept for the place that has the replica, besides its values and its optimizer's state."""

    def _take_beside(self, beside: Any) -> None:
        """Go on with it; None where the place has taken no step since all have met."""

    @contextmanager
    def _as_after(self, step: int) -> Iterator[None]:
        """In this block the optimizer's settings are those that the scheduler had made of them by then."""
        groups = self._replica.optimizer.param_groups
        then = self._rates.get(step, [{} for _ in groups])  # none where nobody changes them
        now = [{key: group[key] for key in settings} for group, settings in zip(groups, then, strict=True)]
        for group, settings in zip(groups, then, strict=True):
            group.update(settings)
        try:
            yield
        finally:  # others may be lost meanwhile
            for group, settings in zip(groups, now, strict=True):
                group.update(settings)
