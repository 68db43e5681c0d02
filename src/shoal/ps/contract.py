"""The contracts of the parameter server: what runs it, and what it runs on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from shoal.comm.codec import Frame, Message
from shoal.ps.messages import PsMessage, Push


class Machine(Protocol):
    """A member's part of the protocol: fed with messages and the time, it says what to send. No I/O."""

    outbox: deque[tuple[int, PsMessage]]
    """What to send, and to which node; whoever drives the machine empties it."""
    wakeup: float
    """When `on_tick` should be called at the latest."""

    def on_message(self, sender: int, message: PsMessage, now: float) -> None:
        """Take in a message. Whatever it is, it does not raise: strange ones are ignored and counted."""

    def on_tick(self, now: float) -> None:
        """Do what is due: repeat what was not answered, report."""


class ShardJournal(Protocol):
    """What a primary leaves of a shard, beside its values, in memory that outlives it; see `inheritance.py`."""

    @property
    def is_void(self) -> bool:
        """Whether what lies there has no journal, and nobody can go on with it."""

    def give_up(self) -> None:
        """What lies there from now on has no journal."""

    def begin(self, books: Message) -> bool:
        """From now on entries follow these books; whether there was room for them."""

    def append(self, entry: Message) -> bool:
        """Note an entry of the log that is about to be applied; whether there was room for it."""

    def books(self) -> Message | None:
        """The books that the last primary began with; None where there was none: the model begins."""

    def entries(self) -> Iterable[Message]:
        """The entries that followed. The values know how much of each they have when it is taken in again."""


class ShardValues(Protocol):
    """One shard's parameters and optimizer state, wherever they lie."""

    @property
    def journal(self) -> ShardJournal | None:
        """None where the values end with their server."""

    def initialise(self) -> None:
        """Become what the model is at first."""

    def resume(self, facts: dict[str, Any]) -> None:
        """Become what a killed server left in this home; `facts` are those of the journal's books."""

    def fits(self, push: Push) -> bool:
        """Whether the push's bulk has this shard's sizes; others are refused before anything is logged."""

    def step(self, gradients: Sequence[Push], *, scale: float, lr_scale: float, loss: float, last: bool) -> None:
        """One update of the optimizer with the sum of these gradients, in this order, times `scale`.

        `last`: it completes a step of the whole batch, so the learning rate's schedule moves on.
        """

    def skip(self, pushes: Sequence[Push], *, loss: float, last: bool) -> None:
        """An update that is not made, because a gradient is no number; all else that goes with one is done."""

    def own_part(self, gradients: Sequence[Push], *, scale: float) -> tuple[Frame, ...]:
        """This shard's part in closing a round together with all others, from the sum that `step` would take.

        Without gradients: nothing, where the round is not applied; or, where copies tell each other of changes,
        what has changed since this was last asked, other than by `add`.
        """

    def fits_part(self, shard: int, frames: Sequence[Frame]) -> bool:
        """Whether these can be another shard's part."""

    def factor(self, parts: Mapping[int, Sequence[Frame]], *, scale: float) -> float:
        """What to multiply the round's gradient by, from the parts of all shards; times `scale` they are means."""

    def add_parts(self, parts: Sequence[Sequence[Frame]]) -> tuple[Frame, ...]:
        """Where each shard is a whole copy: the sum of several's parts, which is both a part and a push's bulk."""

    def add(self, frames: Sequence[Frame], *, loss: float, steps: int) -> None:
        """Add what another copy changed; with it, so many steps of the whole batch are complete."""

    def average(self, pushes: Sequence[Push], *, share: float) -> None:
        """Move to the mean of these parameters, weighted by their weights: `1 - share` of the old values stay."""

    def parts(self, *, whole: bool) -> Iterable[Sequence[Frame]]:
        """The parameters for a worker that shares no memory, in parts, first layers first; or all there is."""

    def facts(self) -> dict[str, Any]:
        """What there is besides the bulk, as plain data."""

    def frames(self) -> tuple[Frame, ...]:
        """The bulk, for a new backup."""

    def load(self, frames: Sequence[Frame], facts: dict[str, Any]) -> None:
        """Become what `frames` and `facts` of another copy say."""

    def mark(self) -> None:
        """Remember the values as they are."""

    def rollback(self) -> bool:
        """Go back to what `mark` remembered; whether there was anything."""

    def digest(self) -> str:
        """One name for all of it, to compare copies by."""
