"""Averaging over hosts of which some may be lost: those who are left take their places, in the middle of a round.

What all have in common is what they agreed on last, and each of them has that. A place that is lost begins there
again, with an optimizer that knows nothing yet, and takes the steps of its round once more: in a process that goes
on with its own places, which never move. What had been told of these steps stays told, so each counts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from shoal.checkpoint.model_stream import TensorStream
from shoal.comm.group import HierarchicalGroup
from shoal.ledger.shares import Sizes
from shoal.model.optimizer.state import load_named_state
from shoal.model.replica import Replica
from shoal.spec import Average, World
from shoal.spec.averaging import Clip
from shoal.step.work import Work
from shoal.strategies.average.common_sums import CommonSums
from shoal.strategies.average.outer import difference_
from shoal.strategies.average.places_in_turn import PlacesInTurn
from shoal.strategies.average.team import Team
from shoal.strategies.base import Fill, Past, Setting
from shoal.strategies.groups.kept_apart import KeptApart
from shoal.strategies.groups.orders import awaiting_orders
from shoal.strategies.groups.over_hosts import open_over_hosts
from shoal.strategies.groups.vector_sums import wire_facts
from shoal.strategies.groups.vectors import Vectors

_WORDS, _AGREEMENT, _MEAN, _END = "words", "agreement", "mean", "end"
"""What workers meet for, after a step; for a table, too."""


class SpreadAverage(PlacesInTurn):
    """One process's part in it."""

    _links: HierarchicalGroup
    """All processes that there are; the first has the first place."""

    def __init__(self, spec: Average) -> None:
        super().__init__(spec)
        self.handover = self
        self._gathered = (-1, -1)
        """After which step all have met here, and in which generation."""
        self._sent = 0
        """Bytes of differences."""

    def open(self, replica: Replica, setting: Setting) -> None:
        self._have_none(replica)
        self._begun = replica.start
        self._agreed_at = replica.start.step
        """The step that the round has begun after, as far as this run knows."""
        super().open(replica, setting)
        self._common_sums = CommonSums(self._links, setting.company)
        self._numbers = [each.clone() for each in self._values.whole_numbers()]
        """Of what was agreed on: what has no mean."""
        self._have(self._index, self._step)

    def _open_group(self, setting: Setting) -> HierarchicalGroup:
        self._links = open_over_hosts(setting)
        return self._links

    # Steps and agreements.

    def take(self, work: Work) -> Any:
        if self._step < work.step:
            self._take_all(work)
        if self._is_agreement_due:
            self._block()
            self._rounds.settle()
            self._agree()
        return self._own

    @property
    def _is_agreement_due(self) -> bool:
        return self._agreed_at < self._step and self._spec.is_agreement(self._step, self._size)

    def _speak(self, rows: Any) -> torch.Tensor:
        own = torch.stack([torch.stack(list(by_place.values())).sum(0) for by_place in rows.values()])
        (found,) = self._common_sums.sum(max(rows), _WORDS, [own])
        return found

    def _agree(self) -> None:
        if (shares := self._shares()) is not None:
            found = self._changes(_AGREEMENT, shares, self._clip)
            kinds = list(self._agreed)
            # Others may need the sum.
            self._take_outer_step({kind: one.clone() for kind, one in zip(kinds, found, strict=False)})
            self._numbers = [number.clone() for number in found[len(kinds) :]]
            for place in self._places:
                self._turn_to(place)
                self._take_agreed()
            self._turn_to(self._places[0])
        self._end_round()
        self._agreed_at, self._rates = self._step, {}

    def _take_agreed(self) -> None:
        """The place that has the replica takes what all have agreed on last."""
        self._values.write(self._agreed)
        for each, agreed in zip(self._values.whole_numbers(), self._numbers, strict=True):
            each.copy_(agreed)

    def _changes(self, name: str, shares: torch.Tensor, clip: Clip | None) -> Sequence[torch.Tensor]:
        """How far all have come since they agreed, in the mean, by kind; and the counts of the first place."""
        if (kept := self._common_sums.kept(self._step, name)) is not None:
            return kept
        total, numbers = Vectors(), [torch.zeros_like(each) for each in self._numbers]
        for place in self._places:
            self._turn_to(place)
            found = difference_(self._values.read(), self._agreed, self._values.params_of, clip, self._norm)
            for kind, vector in found.items():
                vector.mul_(float(shares[place]))
                total[kind] = total[kind].add_(vector) if kind in total else vector
            if place == 0:
                numbers = [each.clone() for each in self._values.whole_numbers()]
        self._turn_to(self._places[0])
        self._sent += sum(vector.nbytes for vector in total.values())
        return self._common_sums.sum(self._step, name, [*total.values(), *numbers])

    # Others are lost.

    def reform(self, world: World) -> int:
        """Go on with those who are left, and with the places of those who are not."""
        self._setting = replace(self._setting, world=world)
        self._links.abandon()
        with awaiting_orders(self._setting.company):
            self._group = self._peers = self._open_group(self._setting)
            self._common_sums.go_on_in(self._links)
        if self._is_agreement_due and self._common_sums.kept(self._step, _AGREEMENT) is not None:
            self._agree()  # others have, and may be in the next round: what is lost begins there
        for place in world.places:
            if place not in self._taken:
                self._begin_lost(place)
            self._catch_up(place)
        self._turn_to(world.places[0])
        return self._step

    def _begin_lost(self, place: int) -> None:
        """Let a place begin its round again."""
        self._common.put_aside(self._beside())
        self._index, self._team = place, Team(number=place, count=self._size)
        self._take_agreed()
        if self._agreed_at == self._begun.step:  # the run may have begun in the middle of a round
            self._replica.start = self._begun
            self._take_up(self._replica)
            load_named_state(self._replica)
            self._go_on_apart()
        self._have(place, self._agreed_at)

    @property
    def may_release(self) -> bool:
        """What a place has of its own nobody else has: it goes with its process."""
        return False

    def gather(self) -> bool:
        self._rounds.settle()
        if not self._is_whole:
            self._mean_model({})
        now = self._step, self._setting.world.generation
        if self._common_sums.kept(self._step, _END) is None:
            self._common_sums.sum(self._step, _END, [torch.zeros(1)])  # what was sent before has come to all
            self._gathered = now
        return self._gathered == now

    def committed(self) -> int:
        return self._agreed_at

    def losses(self, first: int, last: int) -> list[float]:
        raise AssertionError(_NOBODY_COMES)

    def sizes(self, step: int) -> Sizes | None:
        """All parts are even."""
        return None

    def past(self, first: int, last: int) -> Past:
        raise AssertionError(_NOBODY_COMES)

    # What others read.

    def _mean_model(self, own: Vectors) -> Vectors:
        if (shares := self._shares()) is None:
            return self._agreed
        found = self._changes(_MEAN, shares, None)
        return {kind: self._agreed[kind] + one for kind, one in zip(self._agreed, found, strict=False)}

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        self._rounds.settle()
        name = f"table {serial}"
        table = torch.zeros(shape, dtype=torch.float64)
        if self._common_sums.kept(self._step, name) is None:
            with self._mean_in_use():
                for place in self._places:
                    with self._common.precision_of(place):
                        fill(table, place)
        (found,) = self._common_sums.sum(self._step, name, [table])
        return found.clone()

    def state_stream(self) -> TensorStream:
        """The first worker's, and what all others have aside. It is left where somebody is lost."""
        own, aside = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for place in self._places:
            self._turn_to(place)
            state = self.snapshot()
            own |= state if place == 0 else {}
            aside |= {f"{place}/state/{path}": one for path, one in state.items() if place}
            if self._replica.precision.scales:
                half = torch.tensor(self._replica.precision.state.values, dtype=torch.float64)
                aside[f"{place}/precision/values"] = half
            aside |= self._kept_apart()
        self._turn_to(self._places[0])
        with awaiting_orders(self._setting.company):
            stream = KeptApart("replica", aside).stream(own, self._links)
        return replace(stream, tensors=self._awaited(stream.tensors))

    def _awaited(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        with awaiting_orders(self._setting.company):
            yield from tensors
            self._links.barrier()  # who has all must not turn to something else while others wait for its answer

    def _wire(self) -> dict[str, Any]:
        return wire_facts("none", self._sent, self._sent)


_NOBODY_COMES = "nobody comes to a run of which nobody has the whole state"
