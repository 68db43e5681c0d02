"""The supervisor's part in the faults that a user asked for: when each is due, and doing it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from random import Random

from shoal.comm.words import Misbehave
from shoal.launch.crew import Hand
from shoal.launch.hangs import step_of
from shoal.launch.succession import Bridge
from shoal.launch.worlds import servers_of
from shoal.observe.happenings import FaultInjected, Warned
from shoal.observe.wording import plural
from shoal.spec import Job
from shoal.spec.chaos import COOPERATIVE, RANDOM_FACTOR, RANDOM_SLOW_S, Chaos, Fault, RandomFaults, parse_chaos
from shoal.spec.told import Told
from shoal.spec.vocabulary import Role, State

_TRAINS = (State.TRAINING, State.EVALUATING)
_SERVES = (State.READY,)


class Timetable:
    """When the faults of a run are due. Fed with steps and times; no clock, no processes."""

    def __init__(self, chaos: Chaos, sizes: Mapping[Role, int]) -> None:
        self._waiting = list(chaos.faults)
        self._due: list[tuple[float, Fault]] = []
        self._stream = RandomStream(chaos.random, sizes) if chaos.random is not None else None
        self._jitter = Random(0)
        self._began: tuple[float, int] | None = None
        self._top_step = 0
        self._draw_at: float | None = None
        self._drawn: Fault | None = None
        self._struck = 0

    @classmethod
    def of(cls, job: Job) -> Timetable:
        """That of all faults of a job."""
        servers = servers_of(job)
        sizes = {Role.WORKER: job.cluster.places, Role.SERVER: servers, Role.COORDINATOR: min(servers, 1)}
        return cls(parse_chaos(job.chaos), sizes)

    def begin_again(self) -> None:
        """The run goes on from an earlier step: what has struck does not strike again, the rest is to come."""
        self._waiting += [fault for _, fault in self._due if fault is not self._drawn]
        self._due, self._began, self._top_step, self._draw_at = [], None, 0, None

    def note(self, rank: int, step: int, now: float) -> None:
        """A worker has done this step, so it is in the next."""
        self._top_step = max(self._top_step, step)
        if self._began is None:
            self._began = now, step
            self._await_random(now)
        for fault in list(self._waiting):
            if fault.role == Role.WORKER and fault.rank != rank:
                continue
            if step + 1 >= fault.step:
                self._waiting.remove(fault)
                self._due.append((self._moment(fault, now), replace(fault, step=step + 1)))

    def ready(self, now: float) -> list[Fault]:
        """The faults whose time has come; each until it is `struck`, for its target may not be there yet."""
        if self._stream is not None and self._draw_at is not None and self._draw_at <= now:
            self._drawn, self._draw_at = replace(self._stream.draw(), step=self._top_step + 1), None
            self._due.append((now, self._drawn))
        return [fault for at, fault in self._due if at <= now]

    def strike(self, fault: Fault, now: float) -> None:
        """It has come to pass."""
        self._due.remove(next(entry for entry in self._due if entry[1] is fault))
        self._struck += 1
        if fault is self._drawn:
            self._await_random(now)

    def next_time(self, now: float) -> float | None:
        """When the next fault is due that is not due yet."""
        times = [at for at, _ in self._due]
        times += [] if self._draw_at is None else [self._draw_at]
        return min((at for at in times if at > now), default=None)

    @property
    def open(self) -> list[Fault]:
        """What has not come to pass."""
        return [*(fault for _, fault in self._due), *self._waiting]

    def tell_open(self, emit: Callable[[Warned], None]) -> None:
        """At the end: which faults never came to pass. A test that thinks they did would prove nothing."""
        if missed := self.open:
            total = plural(len(missed) + self._struck, "fault")
            text = f"{len(missed)} of {total} never fired: {'; '.join(str(fault) for fault in missed)}"
            emit(Warned(text=text))

    def _await_random(self, now: float) -> None:
        """The next one comes some time after the last has struck, so that they do not pile up."""
        if self._stream is not None:
            self._draw_at = now + self._stream.gap_s()

    def _moment(self, fault: Fault, now: float) -> float:
        """A process may die anywhere in a step, not only at its beginning."""
        assert self._began is not None
        begun, first = self._began
        steps = self._top_step - first
        if fault.kind in COOPERATIVE or not steps:
            return now
        return now + self._jitter.random() * (now - begun) / steps


class RandomStream:
    """An endless list of faults and of the times between them; the seed decides all of it."""

    def __init__(self, wish: RandomFaults, sizes: Mapping[Role, int]) -> None:
        self._wish = wish
        self._sizes = sizes
        self._random = Random(wish.seed)
        self._choices = [
            (role, kind)
            for role in wish.targets
            for kind in wish.kinds
            if role == Role.WORKER or kind not in COOPERATIVE
        ]

    def gap_s(self) -> float:
        """From one fault to the next."""
        return self._wish.mean_s if self._wish.fixed else self._random.expovariate(1 / self._wish.mean_s)

    def draw(self) -> Fault:
        """The next fault."""
        role, kind = self._random.choice(self._choices)
        rank = self._random.randrange(self._sizes[Role(role)])
        if kind == "slow":
            return Fault(kind=kind, role=role, rank=rank, factor=RANDOM_FACTOR, seconds=RANDOM_SLOW_S)
        return Fault(kind=kind, role=role, rank=rank)


class Mischief:
    """Lets the faults of a timetable happen, and tells of each. A part of the supervisor's machine."""

    def __init__(self, bridge: Bridge, timetable: Timetable) -> None:
        self._timetable = timetable
        self._bridge = bridge
        self._frozen: list[tuple[float, Hand]] = []
        """Processes that hang for a time, and when they may go on."""

    def note(self, hand: Hand, word: Told) -> None:
        """A process has said something: perhaps how far it is."""
        if hand.is_worker and (step := step_of(word)) is not None and hand.state in _TRAINS:
            for place in hand.places:
                self._timetable.note(place, step, self._bridge.now)

    def act(self) -> None:
        """Do what is due to those that are there."""
        now = self._bridge.now
        for fault in self._timetable.ready(now):
            target = self._target_of(fault)
            if target is not None or fault.always:
                self._timetable.strike(fault, now)
                self._strike(fault, target)
        for entry in [entry for entry in self._frozen if entry[0] <= now]:
            self._frozen.remove(entry)
            self._bridge.signal(entry[1], signal.SIGCONT)

    def next_deadline(self) -> float | None:
        """When `act` must be called at the latest."""
        times = [self._timetable.next_time(self._bridge.now), *(at for at, _ in self._frozen)]
        return min((at for at in times if at is not None), default=None)

    def _target_of(self, fault: Fault) -> Hand | None:
        """The process that this is about, where it is at work."""
        for hand in self._bridge.crew.living(Role(fault.role)):
            is_at_work = hand.state in (_TRAINS if hand.is_worker else _SERVES)
            ranks = hand.places if hand.is_worker else (hand.global_rank,)
            if fault.rank in ranks and is_at_work and not hand.is_done:
                return hand
        return None

    def _strike(self, fault: Fault, target: Hand | None) -> None:
        told = FaultInjected.from_plain(asdict(fault))
        self._bridge.emit(told, fault.rank if told.role == Role.WORKER else None)
        if fault.always or target is None:
            return  # Whoever computes this part knows it from the job.
        if fault.kind == "kill":
            self._bridge.signal(target, signal.SIGKILL)
        elif fault.kind == "hang":
            self._bridge.signal(target, signal.SIGSTOP)
            if fault.seconds is not None:
                self._frozen.append((self._bridge.now + fault.seconds, target))
        else:
            wish = Misbehave(fault=fault.kind, factor=fault.factor, seconds=fault.seconds)
            self._bridge.say(target, wish)
