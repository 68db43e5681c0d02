"""Who has which replica in the host's shared memory, and where all meet.

When all meet (when the run begins, to agree, or because somebody looks at the model in the middle of a round) each
leaves its values and its optimizer's state in the segment; everybody reads the others' there. Local steps follow
from the seed, the step and the slot, so whoever takes a dead worker's place begins where that one has left
something last, takes the same steps again, and comes to the same bits. Nobody else notices but by waiting.

A replica belongs to a place. There are as many as the run began with; a process hosts one or more of them, which
take their steps in turn, and which ones makes no difference to a single bit. Places leave a process only where all
have met, so that whoever gets them has nothing to do again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace

import torch

from shoal.errors import PeerLost
from shoal.model.blueprint import Blueprint, model_size
from shoal.model.buffers import moving_buffers
from shoal.model.half_range import HalfState
from shoal.model.optimizer.state import load_named_state
from shoal.model.replica import Replica
from shoal.spec import World
from shoal.spec.vocabulary import Role
from shoal.strategies.average.members import begin_apart, mean_of
from shoal.strategies.average.memory import AverageMemory, LeftHead
from shoal.strategies.average.places_in_turn import PlacesInTurn
from shoal.strategies.average.rounds import Rounds
from shoal.strategies.average.sizes import cut_size
from shoal.strategies.average.team import Team
from shoal.strategies.average.values import AgreedValues
from shoal.strategies.base import Setting, StepResult
from shoal.strategies.data.sizes import size_of_run
from shoal.strategies.groups.vectors import Vectors


class HostedModels(PlacesInTurn):
    """The places of one process, and how it meets the others."""

    def open(self, replica: Replica, setting: Setting) -> None:
        self._replica, self._setting = replica, setting
        self._size = setting.world.world_size
        # A spare warms up, which moves these.
        self._first_buffers = [each.clone() for each in moving_buffers(replica.module)]
        self._memory = self._map(replica, setting)
        self._meeting, self._met, self._agreements = 0, -1, 0
        self._have_none(replica)
        self._has_begun = False
        if setting.world.role == Role.WORKER:
            self.reform(setting.world)

    def _map(self, replica: Replica, setting: Setting) -> AverageMemory:
        blueprint = Blueprint.of(replica)
        run = size_of_run(blueprint, replica.precision, setting.extent, setting.slots, self._size)
        cut = cut_size(self._spec, blueprint, self._size)
        regions = self._spec.segment_regions(model_size(blueprint), run, cut)
        return AverageMemory(AgreedValues(replica), setting, regions, self._spec.round_steps(self._size))

    # Places come and go.

    def reform(self, world: World) -> int:
        """Have these places: those of ones that died or left, or of nobody yet."""
        self._setting = replace(self._setting, world=world)
        if not self._has_begun:
            self._begin(world.places[0])
        for place in self._taken.keys() - set(world.places):
            del self._taken[place]
            self._common.leave(place)
        if self._meeting:
            for place in world.places:
                if place not in self._taken:
                    self._take_over(place)
                self._catch_up(place)
        else:
            self._come(world.places)
        self._turn_to(world.places[0])
        return self._step

    @property
    def may_release(self) -> bool:
        """Where all have met, so that who comes next has nothing to do again."""
        return self._met == self._step

    @property
    def _agrees_at_first(self) -> bool:
        """Whether all begin apart, and count how far they come from the mean of where they begin."""
        return self._spec.begins_apart and self._spec.agrees_with_all and self._replica.start.model is None

    def _agree_at_first(self) -> None:
        for kind, vector in mean_of(self._found()).items():
            self._agreed[kind].copy_(vector)
        self._tell_agreed()

    def _is_agreement(self, step: int) -> bool:
        """Whether all agree after a step of this run."""
        return step > self._replica.start.step and self._spec.is_agreement(step, self._size)

    def _begin(self, first: int) -> None:
        """As all begin: with the task's own values, or a checkpoint's; and as this place begins."""
        replica, memory = self._replica, self._memory
        counters, opened = memory.counters, memory.marks.opened
        self._together = None
        self._step, self._start = replica.start.step, replica.start
        self._rounds = Rounds(self._size, self._setting.slots, self._speak)
        self._rounds.names = lambda: replica.loss_parts.names
        self._rounds.facts = self._facts
        self._rounds.note = self._note
        for each, begun in zip(moving_buffers(replica.module), self._first_buffers, strict=True):
            each.copy_(begun)
        is_to_open = first == 0 and not counters[opened]
        values = AgreedValues(replica)
        if is_to_open:
            values.read_into(memory.agreed(0))
        else:
            counters.wait(opened, 1)
        if replica.start.model is None:
            values.write(memory.agreed(0))
        self._first_values = values.read() if len(self._places) > 1 else {}
        self._make_own(first)
        self._go_apart()
        if is_to_open:
            past = replica.start.losses[: len(memory.losses) - 1]
            memory.losses[1 : 1 + len(past)] = past
            self._publish()
            counters.publish(opened, 1)
        self._has_begun = True

    def _make_own(self, place: int) -> None:
        """Let the replica, with which all begin, begin as a place does."""
        self._index, self._team = place, Team(number=place, count=self._size)
        self._replica.start = self._start
        self._take_up(self._replica)
        begin_apart(self._replica, place, self._size, is_own=self._spec.begins_apart)

    def _begin_another(self, place: int) -> None:
        """Let a place begin in the replica that another one had."""
        self._common.put_aside(self._beside())
        AgreedValues(self._replica).write(self._first_values)
        for each, begun in zip(moving_buffers(self._replica.module), self._first_buffers, strict=True):
            each.copy_(begun)
        self._make_own(place)
        load_named_state(self._replica)
        self._go_on_apart()

    def _come(self, places: tuple[int, ...]) -> None:
        """Have the first places of this process, and meet the others where those have met last.

        All meet when the run begins: whoever comes later finds what each place has left.
        """
        counters, arrived = self._memory.counters, self._memory.marks.arrived
        for place in places:
            if place in self._taken or counters[arrived[place]]:
                continue
            if place != self._index or self._taken:
                self._begin_another(place)
            self._have(place, self._step)
            self._leave(place, 1)
        meeting = min(counters[arrived[place]] for place in places)
        if not self._taken:
            self._go_on_from(next(place for place in places if counters[arrived[place]] == meeting), meeting)
        counters.wait_all(arrived, meeting)
        for place in places:
            if place not in self._taken:
                head, _ = self._take_up_left(place)
                self._is_apart = self._is_apart or head.step > self._replica.start.step
        self._meeting, self._met = meeting, self._step
        self._first_values = {}
        if self._is_agreement(self._step):
            self._agree()
        elif self._agrees_at_first and not self._agreements:
            self._agree_at_first()

    def _go_on_from(self, place: int, meeting: int) -> None:
        """Know what all knew when they met."""
        memory = self._memory
        head = memory.left_head(place, meeting)
        self._step, self._agreements = head.step, head.agreements
        self._rounds.weights.copy_(head.weights)
        memory.counters.wait(memory.marks.agreed, head.agreements)
        for kind, vector in memory.agreed(head.agreements).items() if self._agreed else ():
            self._agreed[kind].copy_(vector)
        if self._outer.optimizer is not None:
            memory.outer(head.agreements).read(self._outer.optimizer)

    def _take_up_left(self, place: int) -> tuple[LeftHead, int]:
        """Have a place as it was when the one before has left it; what is said of that, and at which meeting."""
        memory, replica, common = self._memory, self._replica, self._common
        meeting = memory.counters[memory.marks.arrived[place]]
        head = memory.left_head(place, meeting)
        if not head.is_kept:
            raise PeerLost(
                f"Worker {place} is gone, and with it the state of {type(replica.optimizer).__name__}, which "
                "only it held; start again, or use an optimizer that works element by element, such as AdamW."
            )
        common.put_aside(self._beside())
        self._index, self._team = place, Team(number=place, count=self._size)
        self._values.write(memory.left_values(place, meeting))
        for each, left in zip(self._values.whole_numbers(), memory.left_numbers(place, meeting), strict=True):
            each.copy_(left)
        _, (half, moved) = memory.left_state(place, meeting).read(replica.optimizer)
        replica.precision.adopt(HalfState.of(half))
        if common.moved is not None:
            common.moved.adopt(moved)
        self._have(place, head.step)
        return head, meeting

    def _take_over(self, place: int) -> None:
        """Have one more place, while this process goes on: as it was after all had met last."""
        head, meeting = self._take_up_left(place)
        if meeting == self._meeting and self._is_agreement(head.step):
            self._go_home(place, head.step, is_moved=bool(head.weights.sum() > 0))
        self._publish_agreed()  # where who had the first place could not

    @abstractmethod
    def _go_home(self, place: int, step: int, *, is_moved: bool) -> None:
        """What the place that has the replica takes of the agreement after a step; `is_moved`: of all, where
        anybody was trained on anything."""

    # Speaking and meeting.

    def _speak(self, rows: Mapping[int, Mapping[int, torch.Tensor]]) -> torch.Tensor:
        memory, last = self._memory, max(rows)
        spoken, counters = memory.marks.spoken, memory.counters
        for step, by_place in rows.items():
            for place, row in by_place.items():
                # What the one before has told stands: others have decided by it.
                if counters[spoken[place]] < step:
                    memory.words(step)[place] = row
        for place in self._places:
            if counters[spoken[place]] < last:
                counters.publish(spoken[place], last)
        counters.wait_all(spoken, last)
        return torch.stack([memory.words(step).sum(0) for step in rows])

    def _note(self, step: int, result: StepResult) -> None:
        """All have spoken of a step: who comes later finds there what it came to."""
        if step < len(self._memory.losses):
            self._memory.losses[step] = result.loss
            self._memory.counts[step] = result.counts

    def _meet(self) -> None:
        """Leave all that the places of this process have, and wait until all others have."""
        counters, arrived = self._memory.counters, self._memory.marks.arrived
        meeting = self._meeting + 1
        for place in self._places:
            if counters[arrived[place]] < meeting:
                self._turn_to(place)
                self._leave(place, meeting)
        self._turn_to(self._places[0])
        counters.wait_all(arrived, meeting)
        self._meeting, self._met = meeting, self._step
        self._rates = {}

    def _leave(self, place: int, meeting: int) -> None:
        """Leave all that the place has whose replica this is now."""
        memory, moved = self._memory, self._common.moved
        head = LeftHead(
            step=self._step,
            is_last=self._rounds.is_last,
            agreements=self._agreements,
            is_kept=True,
            weights=self._rounds.weights,
        )
        beside = [list(self._replica.precision.state.values), None if moved is None else moved.plain()]
        memory.leave(place, meeting, head, self._replica.optimizer, beside)
        memory.counters.publish(memory.marks.arrived[place], meeting)

    def _meet_here(self) -> None:
        """The same, where all have not met after this step already."""
        self._rounds.settle()
        if self._met != self._step:
            self._meet()

    def gather(self) -> bool:
        self._meet_here()
        return True

    # What all have agreed on.

    def _tell_agreed(self) -> None:
        """Once more all have agreed."""
        self._agreements += 1
        self._publish_agreed()

    def _publish_agreed(self) -> None:
        """Leave that for who follows anybody, where nobody has: whoever has the first place."""
        agreed = self._memory.marks.agreed
        if 0 in self._places and self._memory.counters[agreed] < self._agreements:
            self._publish()
            self._memory.counters.publish(agreed, self._agreements)

    def _publish(self) -> None:
        """Leave what all have agreed on, and the outer optimizer's state."""
        for kind, vector in self._memory.agreed(self._agreements).items() if self._agreed else ():
            vector.copy_(self._agreed[kind])
        if self._outer.optimizer is not None:
            self._memory.outer(self._agreements).write(self._outer.optimizer, self._step)

    def _found(self) -> list[Vectors]:
        """By worker: the values that it has left."""
        return [self._memory.left_values(place, self._meeting) for place in range(self._size)]
