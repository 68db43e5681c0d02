"""What a worker tells the supervisor, and what it is told."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shoal.comm.channel import Channel
from shoal.comm.words import (
    PARTING,
    TO_PROCESSES,
    Adopt,
    Announced,
    AwaitDeal,
    CoordinatorMoved,
    MetAll,
    Misbehave,
    Redeal,
    Release,
    Stop,
    Takeover,
    understood,
)
from shoal.observe.happenings import (
    Adopted,
    CutsChanged,
    Done,
    Evaluated,
    LineSaid,
    ProgressMade,
    ScalarsLogged,
    StateEntered,
    StepsTaken,
    Warned,
)
from shoal.observe.unsent import Unsent
from shoal.roles.memory.peak import peak_memory
from shoal.roles.process.pulse import Pulse
from shoal.roles.process.timeline import Timeline
from shoal.roles.training.chaos import Sabotage
from shoal.roles.training.hosting import MoveOrder, OrderBook, PlacesMoved
from shoal.spec import World
from shoal.spec.told import Told
from shoal.spec.vocabulary import State
from shoal.strategies.base import StepResult

_REPORT_EVERY_S = 0.1
_IDLE_S = 0.05
"""How often a process that waits for others shows that it lives."""
FOLLOW_EVERY_S = 0.5
"""How often a spare looks at what others have done."""


class Reporter:
    """Tells the supervisor how the run goes; the first worker speaks for all about the loss."""

    def __init__(
        self,
        world: World,
        channel: Channel,
        clock: Callable[[], float] = time.monotonic,
        *,
        timeline: Timeline | None = None,
        sabotage: Sabotage | None = None,
        is_quiet: bool = False,
    ) -> None:
        self._world = world
        self._channel = channel
        self._clock = clock
        self._told_at = clock()
        self._asked_at = 0.0
        self._stop = False
        self._met: dict[str, list[str]] = {}
        """By name: what all workers have left who met, until this one has seen it."""
        self.coordinator = ""
        """Where it listens, once it has moved."""
        self.is_held = False
        """Whether a worker that died alone is about to be followed."""
        self._orders = OrderBook()
        self._steps: list[list[Any]] = []
        self._parts: list[list[Any]] = []
        """What the losses of these are told with."""
        self._skipped = [0, 0.0]
        """Parts of batches, and what they would have counted, in steps that were not told yet."""
        self._latest: dict[str, Any] = {}
        self._logged: list[Told] = []
        """What is told after the steps that were not told yet."""
        self.unsent: Unsent | None = None
        """Where that lies until it is told, if the process may be killed meanwhile."""
        self.pulse = Pulse(clock=clock)
        """Signs that this process moves."""
        self.step = 0
        self.total_steps = 0
        self._timeline = timeline
        self._is_quiet = is_quiet
        self.sabotage = sabotage
        """The faults of this process, where the job asks for any."""

    def send(self, told: Told) -> None:
        self._channel.send(told.as_message())

    def line(self, text: str) -> None:
        self.send(LineSaid(text=text))

    def warn(self, text: str) -> None:
        self.send(Warned(text=text))

    def on_state(self, state: State, step: int) -> None:
        self.flush()  # who dies in it has at least told what it had done before
        self.pulse.enter(state)
        self.send(StateEntered(state=state, step=step))

    def on_step(
        self,
        step: int,
        result: StepResult,
        samples: int,
        learning_rate: float,
        epoch: int,
        *,
        committed: int | None = None,
        more: bool = False,
    ) -> None:
        """A step is done; `committed`: the samples of all workers, where they do not go in step with this one;
        `more`: the next step is told right after it, for what that came to is known, too."""
        self.step = step
        if self._timeline is not None:
            self._timeline.note(samples if committed is None else committed)
        if self._is_quiet:
            return
        if step > self.pulse.step:
            self.pulse.lap(step)
        else:  # its own part of it was done before
            self.pulse.sign()
        if self.sabotage is not None and self.sabotage.reaches_fault(step):
            self.on_state(State.TRAINING, step)
        if not self._world.is_first:
            return
        is_known = result.weight > 0 or not math.isnan(result.loss)  # who joined late may know none
        self._steps.append([step, result.loss if is_known else None])
        if result.parts:
            self._parts.append([step, dict(result.parts)])
        self._skipped[0] += result.skipped_parts
        self._skipped[1] += result.skipped
        self._latest = {"samples": samples, "lr": learning_rate, "epoch": epoch + 1}
        if more:
            return  # steps that all workers have spoken of at once are told at once
        now = self._clock()
        if now - self._told_at > _REPORT_EVERY_S or step == 1:
            self._told_at = now
            self.flush()

    def log(self, told: Told) -> None:
        """Tell this with the latest steps, after them."""
        if self.unsent is not None:
            self.unsent.keep(told)
        last = self._logged[-1] if self._logged else None
        if isinstance(told, ScalarsLogged) and isinstance(last, ScalarsLogged):
            last.scalars.extend(told.scalars)  # many at once cost whoever reads them hardly more than one does
        else:
            self._logged.append(told)

    def on_taken(self, step: int) -> None:
        """This process has done its part of a step; what that came to is known later."""
        if not self._is_quiet:
            self.pulse.lap(step)

    def on_turn(self) -> None:
        """This process has done something that brought the run no further."""
        self.pulse.sign()

    def on_progress(self, step: int, samples: int) -> None:
        """A batch of work without a loss is done (prediction)."""
        self.step = step
        self.pulse.lap(step)
        now = self._clock()
        if now - self._told_at > _REPORT_EVERY_S or step == self.total_steps:
            self._told_at = now
            self.send(ProgressMade(step=step, total_steps=self.total_steps, samples=samples))

    def flush(self) -> None:
        """Send the steps that were not told yet, and what was logged."""
        if self._steps:
            skipped = self._skipped if self._skipped[0] else None
            self.send(
                StepsTaken(
                    steps=self._steps,
                    total_steps=self.total_steps,
                    skipped=skipped,
                    parts=self._parts or None,
                    **self._latest,
                )
            )
            self._steps, self._parts, self._skipped = [], [], [0, 0.0]
        for told in self._logged:
            self.send(told)
        if self._logged and self.unsent is not None:
            self.unsent.clear()
        self._logged = []

    def on_cuts(self, from_step: int, sizes: Sequence[int] | None) -> None:
        """The slots of a batch have other sizes from this step on; None: even ones."""
        self.send(CutsChanged(from_step=from_step, sizes=None if sizes is None else list(sizes)))

    def on_evaluation(
        self, step: int, results: dict[str, float], by_client: dict[str, list[Any]] | None = None
    ) -> None:
        if self._world.is_first:
            self.flush()
            self.send(Evaluated(step=step, results=results, by_client=by_client))

    def wants_stop(self) -> bool:
        """Whether the supervisor has asked for the end. Does not look at every step."""
        now = self._clock()
        if now - self._asked_at > _REPORT_EVERY_S / 2:
            self._asked_at = now
            self._listen()
        return self._stop

    def on_idle(self) -> None:
        """While this process waits for others: it lives, and perhaps what it waits for has become its own."""
        self.pulse.idle()
        self._listen()
        if self._orders.is_urgent:
            raise PlacesMoved

    def take_orders(self, *, at_border: bool) -> Iterable[MoveOrder]:
        """Places that come or go now; inside a step they only come."""
        return self._orders.take(at_border=at_border) if self._orders.open else ()

    def on_moved(self, order: MoveOrder, world: World | None) -> None:
        """Tell that an order has been carried out."""
        self._world = world or self._world
        self.send(order.answer)

    def meet(self, name: str, text: str) -> dict[int, str]:
        """Leave a text for all workers of the run, on whichever host, and wait for theirs, by rank."""
        self.send(Announced(name=name, text=text))
        while name not in self._met:
            self.pulse.idle()
            if (message := self._channel.receive(_IDLE_S)) is not None:
                self._hear(message)
            if self._orders.is_urgent:
                raise PlacesMoved
        return dict(enumerate(self._met.pop(name)))

    def part(self) -> None:
        """Wait until all workers of the run have come to its end, and the first has told what it came to."""
        self.meet(f"{PARTING}@{self._world.generation}", "")

    def _listen(self) -> None:
        while (message := self._channel.poll()) is not None:
            self._hear(message)

    def _hear(self, message: Mapping[str, Any]) -> None:
        word = understood(message, TO_PROCESSES)
        match word:
            case Stop():
                self._stop = True
            case Adopt() | Release() | Redeal():
                self.is_held = False
                self._orders.add(MoveOrder.of(word))
            case AwaitDeal():
                self.is_held = True
            case Misbehave() if self.sabotage is not None:
                self.sabotage.hear(word)
            case MetAll():
                self._met[word.name] = word.texts
            case CoordinatorMoved():
                self.coordinator = word.address

    def wait_for_places(
        self, world: World, prepare: Callable[[], None], follow: Callable[[], None] | None = None
    ) -> World:
        """A spare's life: wait until places are free, or the run is over; meanwhile `follow` it now and then."""
        message = self._channel.poll()
        if message is None:  # else others wait for it already
            prepare()
        self.on_state(State.READY, 0)
        while True:
            match understood(message or {}, TO_PROCESSES):
                case Takeover(places=places, generation=generation):
                    self._world = world.hosting(places, generation)
                    return self._world
                case Redeal() as order:
                    self._world = world.redealt(
                        order.deal, order.hosts, order.member, order.generation, order.torn or ()
                    )
                    return self._world
                case Stop():
                    raise SystemExit(0)
            if follow is not None:
                follow()
            message = self._channel.receive(3600.0 if follow is None else FOLLOW_EVERY_S)

    def confirm_places(self, world: World) -> None:
        """Tell that this process goes on where others left off."""
        self._world = world
        self.send(Adopted(places=list(world.places), generation=world.generation))

    def done(self, results: dict[str, Any]) -> None:
        if self.unsent is not None:
            self.unsent.remove()
        self.on_state(State.DONE, self.step)
        self.send(Done(results=results, memory=peak_memory(self._world.device)))
