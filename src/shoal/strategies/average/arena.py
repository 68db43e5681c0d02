"""Averaging through the host's shared memory: steps, agreements, and what others read of them.

All of a process's places take a step before the next one begins, and an agreement is computed once in a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.checkpoint.aside import put_aside
from shoal.checkpoint.model_stream import TensorStream
from shoal.ledger.shares import Sizes
from shoal.spec import Average
from shoal.step.work import Work
from shoal.strategies.average.gossip import mean_with
from shoal.strategies.average.meaning import mean_difference
from shoal.strategies.average.members import EnsembleMember, mean_of
from shoal.strategies.average.outer import kind_name
from shoal.strategies.average.places import HostedModels
from shoal.strategies.base import Fill, Past
from shoal.strategies.groups.vectors import Vectors


class ArenaAverage(HostedModels):
    """One process's part in it."""

    def __init__(self, spec: Average) -> None:
        super().__init__(spec)
        self.handover = self

    # Steps and agreements.

    def take(self, work: Work) -> Any:
        if self._step < work.step:
            self._take_all(work)
        if self._spec.is_agreement(work.step, self._size):
            self._meet_here()
            self._agree()
        return self._own

    def _agree(self) -> None:
        """What all come to from what each has left; all compute the same."""
        shares = self._shares()
        if self._spec.agrees_with_all and shares is not None:
            parts = shares.tolist()
            mean = mean_difference(self._agreed, self._found(), parts, self._values.num_params, self._clip)
            self._take_outer_step(mean)
        for place in self._places:
            if self._taken[place] == self._step:  # else who had it before had agreed, and had gone on
                self._turn_to(place)
                self._go_home(place, self._step, is_moved=shares is not None)
        self._turn_to(self._places[0])
        self._end_round()
        self._tell_agreed()

    def _go_home(self, place: int, step: int, *, is_moved: bool) -> None:
        if self._spec.is_ensemble:
            return  # nobody takes anything from anybody
        if not self._spec.agrees_with_all:
            self._values.write(self._after_gossip(place, step))
        elif is_moved:
            self._values.write(self._agreed)
            numbers = self._memory.left_numbers(0, self._meeting)
            for each, left in zip(self._values.whole_numbers(), numbers, strict=True):
                each.copy_(left)

    # What others read.

    def _mean_model(self, own: Vectors) -> Vectors:
        self._meet_here()
        found = self._found()
        if self._agreed:
            if (shares := self._shares()) is None:
                return self._agreed
            change = mean_difference(self._agreed, found, shares.tolist(), self._values.num_params, None)
            return {kind: vector + change[kind] for kind, vector in self._agreed.items()}
        return mean_of(found)

    def _members(self) -> list[EnsembleMember]:
        self._meet_here()
        memory, meeting = self._memory, self._meeting
        return [
            EnsembleMember(memory.left_values(place, meeting), memory.left_numbers(place, meeting))
            for place in range(self._size)
        ]

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        memory, counters, rows = self._memory, self._memory.counters, self._memory.marks.shared_rows
        table = memory.table_of(serial, shape)
        if missing := [place for place in self._places if counters[rows[place]] < serial]:
            with self._mean_in_use():
                for place in missing:
                    with self._common.precision_of(place):
                        fill(table, place)
                    counters.publish(rows[place], serial)
        counters.wait_all(rows, serial)
        return table.clone()

    def state_stream(self) -> TensorStream:
        """The first worker's, and what all others have left, which the first one reads."""
        self._meet_here()
        if self._index:
            return TensorStream.of({})
        memory, aside = self._memory, dict[str, torch.Tensor]()
        for place in range(self._size):
            image = memory.left_state(place, self._meeting)
            if place:
                aside |= {f"{place}/state/{path}": one for path, one in image.named(self._replica).items()}
            if self._replica.precision.scales:
                half = torch.tensor(image.beside()[0], dtype=torch.float64)
                aside[f"{place}/precision/values"] = half
            if self._is_apart and not self._spec.is_ensemble:  # whose values are the model's
                left = memory.left_values(place, self._meeting)
                if self._is_agreement(self._step):  # who agrees with neighbours is apart after that, too
                    left = self._after_gossip(place, self._step)
                aside |= {f"{place}/value/{kind_name(kind)}": one for kind, one in left.items()}
        aside |= self._kept_of_all()
        named = {f"replica/{name}": one for name, one in aside.items()}
        return TensorStream.of(self.snapshot() | put_aside(named))

    def _after_gossip(self, place: int, step: int) -> Vectors:
        """What a worker makes of its values and its neighbours' at this meeting."""
        found = self._found()
        return mean_with({peer: found[peer] for peer in self._peers_of(place, step)}, found[place])

    def _load_unsent(self, unsent: Mapping[str, torch.Tensor]) -> None:
        """Nothing is left unsent in memory."""

    def _wire(self) -> dict[str, Any]:
        return {"kind": "memory"}

    def close(self) -> None:
        self._memory.segment.close()

    # For who comes later.

    def committed(self) -> int:
        """The step of the last agreement whose result is there."""
        steps, begun = self._spec.round_steps(self._size), self._replica.start.step
        agreements = self._memory.counters[self._memory.marks.agreed] - self._agrees_at_first
        if agreements > 0:
            return (begun // steps + agreements) * steps
        return begun

    def losses(self, first: int, last: int) -> list[float]:
        """As they were told."""
        found: list[float] = self._memory.losses[first : last + 1].tolist()
        return found

    def sizes(self, step: int) -> Sizes | None:
        """All parts are even."""
        return None

    def past(self, first: int, last: int) -> Past:
        """What those before have used."""
        memory = self._memory
        head = memory.left_head(self._index, self._meeting)
        return Past(memory.counts[first : last + 1], None, head.is_last and head.step == last)
