"""A worker's side of the deal: the slots that are its own, and how far each of them is.

A slot has one owner at a time. Who is to give one up goes no further with it, waits until every shard has what it
pushed, and says so; only then another gets it, and goes on after the clock that the shards have of it. So a slot
is never in two hands, whoever joins or leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.ps.messages import View


class ComingSlots(NamedTuple):
    """What comes next: these slots' parts of one clock."""

    clock: int
    slots: Sequence[int]


class SlotHolder:
    """The slots of one worker."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._given: dict[int, int] = {}
        """By slot: how many had it before; as the newest view has it."""
        self._seen = 0
        """The number of that view."""
        self._adopted = 0
        """The number of the view that it works by."""
        self._is_asked = False
        """Whether the newest view wants slots back from it, though it may never have worked on them."""
        self._held: dict[int, int] = {}
        """The same of those that it works on."""
        self._done: dict[int, int] = {}
        """By slot: the last clock that was begun here."""
        self._fresh: set[int] = set()
        """Taken over from another, and nothing computed for them yet."""

    @property
    def held(self) -> list[int]:
        """The slots that it works on."""
        return sorted(self._held)

    @property
    def is_behind(self) -> bool:
        """Whether it works on others than it should, or has not said that it does not."""
        return self._held != self._given or (self._is_asked and self._adopted < self._seen)

    @property
    def is_given_more(self) -> bool:
        """Whether there are any that it does not work on."""
        return any(self._held.get(slot) != life for slot, life in self._given.items())

    def life_of(self, slot: int) -> int:
        """How many had this slot before: what they left in its buffers is to be left alone."""
        return self._held[slot]

    def is_fresh(self, slot: int) -> bool:
        """Whether another had this slot, and may have left something of its next clock."""
        return slot in self._fresh

    def on_view(self, view: View) -> None:
        """Take in who has which slot; one that is wanted by another is as good as gone."""
        deal = view.settings.get("deal")
        if deal is None:
            return
        self._seen, recalled = view.number, set(deal["recalled"])
        own = {slot: life for slot, (node, life) in enumerate(deal["slots"]) if node == self._node}
        self._given = {slot: life for slot, life in own.items() if slot not in recalled}
        self._is_asked = len(self._given) < len(own)

    def adopt(self) -> int:
        """Work on those that are its own from now on. Returns the number of the view that says so."""
        self._fresh |= {slot for slot, life in self._given.items() if life and self._held.get(slot) != life}
        self._fresh &= set(self._given)
        stays = {slot for slot, life in self._held.items() if self._given.get(slot) == life}
        self._done = {slot: clock for slot, clock in self._done.items() if slot in stays}
        self._held, self._adopted = dict(self._given), self._seen
        return self._seen

    def coming(self, completed: Callable[[int], int], *, at_least: int = 0) -> ComingSlots | None:
        """The slots that are furthest behind, and their next clock; None where there are none.

        `completed`: the clock that every shard has of a slot; nothing before `at_least` is worth doing any more.
        """
        if not self._held:
            return None
        clocks = {slot: self._next_clock(slot, completed, at_least) for slot in self.held}
        clock = min(clocks.values())
        return ComingSlots(clock, [slot for slot, its in clocks.items() if its == clock])

    @property
    def last_begun(self) -> int:
        """The last clock that was begun here for any of its slots."""
        return max(self._done.values(), default=0)

    def begin(self, these: ComingSlots) -> None:
        """These are done, or will be whatever comes: what follows is the next clock."""
        for slot in these.slots:
            self._done[slot] = these.clock

    def note_pushed(self, slot: int) -> None:
        """What another may have left of a slot is of no use any more."""
        self._fresh.discard(slot)

    def _next_clock(self, slot: int, completed: Callable[[int], int], at_least: int) -> int:
        return max(1 + max(self._done.get(slot, 0), completed(slot)), at_least)
