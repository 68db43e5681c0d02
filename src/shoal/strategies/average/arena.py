"""Averaging through the host's shared memory, where another process goes on for one that died.

When all meet (to agree, or because somebody looks at the model in the middle of a round) each leaves its values
and its optimizer's state in the segment; everybody reads the others' there. Local steps follow from the seed, the
step and the slot, so whoever takes a dead worker's place begins where that one has left something last, takes the
same steps again, and comes to the same bits. Nobody else notices but by waiting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from shoal.checkpoint.aside import put_aside
from shoal.checkpoint.model_stream import TensorStream
from shoal.errors import PeerLost
from shoal.ledger.shares import Sizes
from shoal.model.blueprint import Blueprint, model_size
from shoal.model.half_range import HalfState
from shoal.model.optimizer.kinds import state_schema
from shoal.model.optimizer.whole_state import MovedSettings
from shoal.model.replica import Replica
from shoal.spec import Average, World
from shoal.spec.vocabulary import Role
from shoal.step.work import Work
from shoal.strategies.average.gossip import mean_with
from shoal.strategies.average.meaning import mean_difference
from shoal.strategies.average.members import EnsembleMember, begin_apart, mean_of
from shoal.strategies.average.memory import AverageMemory, LeftHead
from shoal.strategies.average.outer import kind_name
from shoal.strategies.average.rounds import Rounds
from shoal.strategies.average.sizes import cut_size
from shoal.strategies.average.strategy import AveragedModel
from shoal.strategies.average.team import Team
from shoal.strategies.average.values import AgreedValues
from shoal.strategies.base import Fill, Past, Setting, StepResult
from shoal.strategies.data.sizes import size_of_run
from shoal.strategies.groups.vectors import Vectors


class ArenaAverage(AveragedModel):
    """One worker's part in it."""

    def __init__(self, spec: Average) -> None:
        super().__init__(spec)
        self.handover = self

    def open(self, replica: Replica, setting: Setting) -> None:
        self._replica, self._setting = replica, setting
        self._size = setting.world.world_size
        # A spare warms up, which moves these.
        self._first_numbers = [each.clone() for each in AgreedValues(replica).whole_numbers()]
        self._memory = self._map(replica, setting)
        self._meeting, self._met, self._agreements = 0, -1, 0
        if setting.world.role == Role.WORKER:
            self.reform(setting.world)

    def _map(self, replica: Replica, setting: Setting) -> AverageMemory:
        blueprint = Blueprint.of(replica)
        run = size_of_run(blueprint, replica.precision, setting.extent, setting.slots, self._size)
        cut = cut_size(self._spec, blueprint, self._size)
        regions = self._spec.segment_regions(model_size(blueprint), run, cut)
        return AverageMemory(AgreedValues(replica), setting, regions, self._spec.round_steps(self._size))

    # Another goes on.

    def reform(self, world: World) -> int:
        """Have the place of one that died, or of nobody yet."""
        (self._index,) = world.places
        self._setting = replace(self._setting, world=world)
        self._begin()
        if met := self._memory.counters[self._memory.marks.arrived[self._index]]:
            self._follow(met)
        elif self._agrees_at_first:
            self._meet()
            self._agree_at_first()
        return self._step

    @property
    def _agrees_at_first(self) -> bool:
        """Whether all begin apart, and count how far they come from the mean of where they begin."""
        return self._spec.begins_apart and self._spec.agrees_with_all and self._replica.start.model is None

    def _agree_at_first(self) -> None:
        for kind, vector in mean_of(self._found()).items():
            self._agreed[kind].copy_(vector)
        self._tell_agreed()

    def _begin(self) -> None:
        """As all begin: with the task's own values, or a checkpoint's."""
        replica, counters, marks = self._replica, self._memory.counters, self._memory.marks
        self._together, self._team = None, Team(number=self._index, count=self._size)
        self._step = replica.start.step
        self._rounds = Rounds(self._index, self._size, self._setting.slots, self._speak)
        self._rounds.names = lambda: replica.loss_parts.names
        self._rounds.facts = self._facts
        self._rounds.note = self._note
        self._take_up(replica)
        for each, first in zip(AgreedValues(replica).whole_numbers(), self._first_numbers, strict=True):
            each.copy_(first)
        is_to_open = self._index == 0 and not counters[marks.opened]
        if is_to_open:
            AgreedValues(replica).read_into(self._memory.agreed(0))
        else:
            counters.wait(marks.opened, 1)
        if replica.start.model is None:
            AgreedValues(replica).write(self._memory.agreed(0))
        begin_apart(replica, self._index, self._size, is_own=self._spec.begins_apart)
        self._go_apart()
        self._moved = MovedSettings(replica.optimizer) if state_schema(replica.optimizer) is None else None
        if is_to_open:
            past = replica.start.losses[: len(self._memory.losses) - 1]
            self._memory.losses[1 : 1 + len(past)] = past
            self._publish()
            counters.publish(marks.opened, 1)

    def _follow(self, meeting: int) -> None:
        """Go on where the one before has left something last."""
        memory, place = self._memory, self._index
        head = memory.left_head(place, meeting)
        if not head.is_kept:
            raise PeerLost(
                f"Worker {place} died, and with it the state of {type(self._replica.optimizer).__name__}, which "
                "only it held; start again, or use an optimizer that works element by element, such as AdamW."
            )
        self._step, self._agreements = head.step, head.agreements
        self._rounds.weights.copy_(head.weights)
        memory.counters.wait(memory.marks.agreed, head.agreements)
        for kind, vector in memory.agreed(head.agreements).items() if self._agreed else ():
            self._agreed[kind].copy_(vector)
        if self._outer.optimizer is not None:
            memory.outer(head.agreements).read(self._outer.optimizer)
        self._values.write(memory.left_values(place, meeting))
        for each, left in zip(self._values.whole_numbers(), memory.left_numbers(place, meeting), strict=True):
            each.copy_(left)
        _, (half, moved) = memory.left_state(place, meeting).read(self._replica.optimizer)
        self._replica.precision.adopt(HalfState.of(half))
        if self._moved is not None:
            self._moved.adopt(moved)
        self._is_apart = True
        self._meeting = meeting - 1
        self._meet()
        if self._spec.is_agreement(self._step, self._size):
            self._agree()
        elif self._agrees_at_first and not head.agreements:
            self._agree_at_first()

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

    # Speaking and meeting.

    def _speak(self, table: torch.Tensor) -> torch.Tensor:
        """Tell of the last steps, and hear of the others'."""
        memory = self._memory
        spoken, counters = memory.marks.spoken, memory.counters
        steps = range(self._step - len(table) + 1, self._step + 1)
        for row, step in zip(table, steps, strict=True):
            # What the one before has told stands: others have decided by it.
            if counters[spoken[self._index]] < step:
                memory.words(step)[self._index] = row
        if counters[spoken[self._index]] < self._step:
            counters.publish(spoken[self._index], self._step)
        counters.wait_all(spoken, self._step)
        for row, step in zip(table, steps, strict=True):
            row.copy_(memory.words(step).sum(0))
        return table

    def _note(self, step: int, result: StepResult) -> None:
        """All have spoken of a step: who comes later finds there what it came to."""
        if step < len(self._memory.losses):
            self._memory.losses[step] = result.loss
            self._memory.counts[step] = result.counts

    def _meet(self) -> None:
        """Leave all that this worker has, and wait until all others have."""
        memory, counters, arrived = self._memory, self._memory.counters, self._memory.marks.arrived
        meeting = self._meeting + 1
        if counters[arrived[self._index]] < meeting:
            half = list(self._replica.precision.state.values)
            moved = None if self._moved is None else self._moved.plain()
            head = LeftHead(
                step=self._step,
                is_last=self._rounds.is_last,
                agreements=self._agreements,
                is_kept=True,
                weights=self._rounds.weights,
            )
            memory.leave(self._index, meeting, head, self._replica.optimizer, [half, moved])
            counters.publish(arrived[self._index], meeting)
        counters.wait_all(arrived, meeting)
        self._meeting, self._met = meeting, self._step

    def _meet_here(self) -> None:
        """The same, where all have not met after this step already."""
        self._rounds.settle()
        if self._met != self._step:
            self._meet()

    # Steps and agreements.

    def take(self, work: Work) -> Any:
        if self._step < work.step:
            self._own = self._rounds.add(self._take_alone(work), work)
            self._step, self._is_apart = work.step, True
        if self._spec.is_agreement(work.step, self._size):
            self._meet_here()
            self._agree()
        return self._own

    def _take_alone(self, work: Work) -> StepResult:
        if self._moved is None:
            return super()._take_alone(work)
        with self._moved.watching():
            return super()._take_alone(work)

    def _agree(self) -> None:
        """What all come to from what each has left; all compute the same."""
        shares, found = self._shares(), self._found()
        if self._spec.is_ensemble:
            pass  # nobody takes anything from anybody
        elif not self._spec.agrees_with_all:
            self._values.write(self._after_gossip(self._index))
        elif shares is not None:
            mean = mean_difference(self._agreed, found, shares.tolist(), self._values.num_params, self._clip)
            self._take_outer_step(mean)
            numbers = self._memory.left_numbers(0, self._meeting)
            for each, left in zip(self._values.whole_numbers(), numbers, strict=True):
                each.copy_(left)
        self._end_round()
        self._tell_agreed()

    def _tell_agreed(self) -> None:
        """Once more all have agreed."""
        self._agreements += 1
        if self._index == 0 and self._memory.counters[self._memory.marks.agreed] < self._agreements:
            self._publish()
            self._memory.counters.publish(self._memory.marks.agreed, self._agreements)

    def _publish(self) -> None:
        """Leave what all have agreed on, and the outer optimizer's state, for who follows anybody."""
        for kind, vector in self._memory.agreed(self._agreements).items() if self._agreed else ():
            vector.copy_(self._agreed[kind])
        if self._outer.optimizer is not None:
            self._memory.outer(self._agreements).write(self._outer.optimizer, self._step)

    def _found(self) -> list[Vectors]:
        """By worker: the values that it has left."""
        return [self._memory.left_values(place, self._meeting) for place in range(self._size)]

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
        memory, rows = self._memory, self._memory.marks.shared_rows
        table = memory.table_of(serial, shape)
        if memory.counters[rows[self._index]] < serial:
            with self._mean_in_use():
                fill(table, self._index)
            memory.counters.publish(rows[self._index], serial)
        memory.counters.wait_all(rows, serial)
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
                if self._spec.is_agreement(
                    self._step, self._size
                ):  # who agrees with neighbours is apart after that, too
                    left = self._after_gossip(place)
                aside |= {f"{place}/value/{kind_name(kind)}": one for kind, one in left.items()}
        aside |= self._kept_of_all()
        named = {f"replica/{name}": one for name, one in aside.items()}
        return TensorStream.of(self.snapshot() | put_aside(named))

    def _after_gossip(self, place: int) -> Vectors:
        """What a worker has made of its values and its neighbours' at this meeting."""
        found = self._found()
        return mean_with({peer: found[peer] for peer in self._peers_of(place)}, found[place])

    def _load_unsent(self, unsent: Mapping[str, torch.Tensor]) -> None:
        """Nothing is left unsent in memory."""

    def _wire(self) -> dict[str, Any]:
        return {"kind": "memory"}

    def close(self) -> None:
        self._memory.segment.close()
