"""The supervisor's machine: what happens goes in with the time, what is to be done comes out. No I/O.

`Supervisor` drives it: it waits until something happens or `next_deadline` has come, tells the machine, and
carries out what it asks for, until the run is `over`.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal.comm.words import Announced, Garbled, ScaleAnswered, Stop
from shoal.errors import Interrupted, LaunchError, ProtocolError, WorkerFailed
from shoal.launch.chaos import Mischief, Timetable
from shoal.launch.crew import Crew, Hand
from shoal.launch.fleet import Fleet
from shoal.launch.hangs import Finding
from shoal.launch.host_scaling import HostScaling
from shoal.launch.meetings import Meetings
from shoal.launch.membership import Membership
from shoal.launch.messages import (
    Answer,
    Deaf,
    Emit,
    Ended,
    HostCame,
    HostFailed,
    HostLost,
    Input,
    Interrupt,
    Load,
    Output,
    Over,
    Said,
    Say,
    ScaleRequest,
    Signal,
    StacksTaken,
    Started,
    StartProcess,
)
from shoal.launch.service import Service
from shoal.launch.succession import Succession
from shoal.launch.verdict import Failure, first_cause, told_failure
from shoal.launch.vigil import Case, Vigil
from shoal.launch.worlds import demand_of, describe_world, servers_of
from shoal.observe.happenings import Done, Failed, Happening, HostAdded, HostGone, StepsTaken, Warned
from shoal.observe.results import RunResults
from shoal.spec import Job, World
from shoal.spec.host_facts import HostFacts
from shoal.spec.told import Told
from shoal.spec.vocabulary import Purpose, Role, State

_SETTLE_S = 0.3
"""How long to wait after a failure for others, so that the cause is shown and not what it caused."""
_GRACE_S = 2.0
"""How long the others may take to end then."""
_STOP_S = 120.0
"""How long workers may take to finish their step, once asked."""
_SAVE_S = 600.0
"""The same while one of them saves: what is on its way to a slow disk is what the request is about to keep."""
_READING = (Purpose.EVALUATE, Purpose.PREDICT, Purpose.INSPECT, Purpose.TRY)
"""Purposes that keep nothing worth waiting for."""


class SupervisorMachine:
    """Decides about one run, from its first process to its end.

    Who follows a process that ends, and when the run is over, is decided by a `Succession`, to which this class
    is the `Bridge`.
    """

    def __init__(
        self,
        job: Job,
        now: float,
        *,
        hang_timeout_s: float | None = None,
        timetable: Timetable | None = None,
    ) -> None:
        """`timetable`: the faults that earlier attempts have left; whoever gives it tells what never fired."""
        self.job = job
        self.now = now
        self.crew = Crew()
        self.outputs: deque[Output] = deque()
        """What is to be done, in this order."""
        self.over: Over | None = None
        """Set when nothing more is to be decided. Whatever still runs is of no use."""
        self.is_stopping = False
        self.is_recalling = False
        """Whether it is told what another machine was told before: then others have looked for those who hang."""
        self.results = RunResults()
        self.first_world = World()
        self._fleet = Fleet((), demand_of(job))
        self._meetings = Meetings(self)
        self._num_workers = 0
        self._failures: list[Failure] = []
        self._judge_at: float | None = None
        self._cause: Failure | None = None
        """Why the run fails. From then on nothing counts but that all end."""
        self._end_by = math.inf
        self._stop_asked_at: float | None = None
        self._world_told = False
        # Who was asked to be quiet does not hang because of that.
        self._vigil = Vigil(self, unmeasured_s=math.inf if job.options.get("quiet") else hang_timeout_s)
        self._timetable = timetable or Timetable.of(job)
        self._tells_what_never_fired = timetable is None
        self._mischief = Mischief(self, self._timetable)
        self._host_scaling = HostScaling(self)
        self._succession: Succession = Service(self) if servers_of(job) else Membership(self)

    def begin(self, worlds: Sequence[World], hosts: Sequence[HostFacts], now: float) -> None:
        """Start the processes that the run begins with, on these hosts."""
        self.now = now
        self.first_world = worlds[0]
        self._num_workers = sum(world.role == Role.WORKER for world in worlds)
        self._fleet = Fleet(hosts, demand_of(self.job))
        for world in worlds:
            self._start(world)

    def take(self, news: Input, now: float) -> None:
        """Something has happened."""
        self.now = now
        if isinstance(news, Ended):
            self.crew.hands[news.process].end = news
        if self.over is not None or (self._cause is not None and not isinstance(news, HostFailed | HostLost)):
            # Whoever would begin again must know that the user does not want that.
            self.is_stopping = self.is_stopping or isinstance(news, Interrupt)
            return
        match news:
            case Said():
                self._hear(self.crew.hands[news.process], news.word)
            case Started():
                hand = self.crew.hands[news.process]
                hand.is_started, hand.life.heard_at = True, now
            case Deaf():
                self.crew.hands[news.process].is_deaf = True
            case Ended():
                self._succession.notice_end(self.crew.hands[news.process])
            case ScaleRequest() if news.hosts is not None:
                self._host_scaling.heed(news, self._fleet, self._succession)
            case ScaleRequest():
                self._succession.scale(news)
            case Interrupt():
                self._heed_interrupt()
            case StacksTaken():
                self._vigil.conclude(news)
            case Load():
                self._succession.hear_load(news)
            case HostLost():
                self._lose_host(news)
            case HostCame():
                number = self._fleet.add(news.facts)
                self.emit(HostAdded(name=news.facts.name))
                self._host_scaling.host_came(number)
                self._succession.host_came(number, news.facts)
                self._succession.hosts_are(len(self._fleet.left), f"host {news.facts.name} has come")
            case HostFailed():
                self._end(LaunchError(news.text) if self._cause is None else self._cause.error)

    def act(self, now: float) -> None:
        """Do what is due."""
        self.now = now
        if self._cause is None and self.over is None:
            if not self.is_recalling:
                self._vigil.act()
            self._check_stop()
            self._mischief.act()
            self._host_scaling.act(self._fleet)
            self._succession.act()
        self._judge()
        if self._judge_at is None and self.over is None and self._succession.is_over():
            stopped = Interrupted("The run was stopped on request, after the step it was in.")
            self._end(stopped if self.is_stopping else None)

    def next_deadline(self) -> float | None:
        """When `act` must be called at the latest, though nothing happens."""
        if self._cause is not None:
            return self._end_by
        deadlines = [
            self._judge_at,
            self._stop_by,
            self._vigil.next_deadline(),
            self._succession.next_deadline(),
            self._mischief.next_deadline(),
            self._host_scaling.next_deadline(),
        ]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    # How another goes on where this one stands, or this one where another stood.

    @property
    def waits_for_stacks(self) -> bool:
        """Whether somebody was found to hang, and it is not known where everybody is."""
        return self._vigil.case is not None

    def found_to_hang(self) -> list[list[Any]]:
        """Who that is, as plain data."""
        found = () if self._vigil.case is None else self._vigil.case.findings
        return [[hand.number, finding.is_silent, finding.seconds] for hand, finding in found]

    def recall_hang(self, found: Sequence[Sequence[Any]], now: float) -> None:
        """These were found to hang."""
        self.now = now
        hands = [(self.crew.hands[number], is_silent, seconds) for number, is_silent, seconds in found]
        findings = [(hand, Finding(hand.life, is_silent, seconds)) for hand, is_silent, seconds in hands]
        self._vigil.reopen(Case(findings, self.crew.top_step, now))

    def go_on(self, now: float) -> None:
        """From here on time counts: nobody was listened to meanwhile."""
        self.now = now
        for hand in self.crew.living():
            hand.life.heard_at = now

    # What processes say.

    def _hear(self, hand: Hand, word: Told) -> None:
        self.crew.note_life(hand, word, self.now)
        self._mischief.note(hand, word)
        try:
            match word:
                case Garbled():
                    self._complain(hand, word.text)
                case Failed():
                    hand.has_reported_failure = True
                    self._succession.hear_failure(hand, told_failure(hand, word))
                case Announced():
                    self._meetings.hear(hand, word)
                case _:
                    self._succession.hear(hand, word)
                    if hand.is_worker and isinstance(word, Happening):
                        self._pass_on(hand, word)
        except ProtocolError as error:
            self._complain(hand, str(error))

    def _complain(self, hand: Hand, text: str) -> None:
        """What a process said means nothing here: it is left out, and told once of each."""
        if not hand.was_garbled:
            hand.was_garbled = True
            self.emit(
                Warned(text=f"{hand.name} said something that cannot be understood, which is left out: {text}")
            )

    def _pass_on(self, hand: Hand, word: Happening) -> None:
        if isinstance(word, StepsTaken):
            self._host_scaling.note(word.samples)
        if isinstance(word, Done):
            hand.is_done = True
            if hand.global_rank == 0 and self.crew.last_loss is not None:
                # Who followed another at the very end has seen none itself.
                word = replace(word, results={"loss": self.crew.last_loss, **word.results})
            self.results.note(hand.global_rank, word)
        self.emit(word, hand.global_rank)
        if not self._world_told and self.crew.all_ready():
            self._world_told = True
            self.emit(describe_world(self.job, self._num_workers, self._fleet.hosts))

    # What the parts of this machine ask for.

    @property
    def has_failed(self) -> bool:
        """Whether the run is ending because something failed."""
        return bool(self._failures)

    @property
    def is_parting(self) -> bool:
        """Whether the workers of several hosts have all come to the end."""
        return self._meetings.is_parting

    def ask(self, output: Output) -> None:
        """Let this be done, after all that was asked before."""
        self.outputs.append(output)

    def emit(self, what: Happening, rank: int | None = None) -> None:
        """Tell whoever watches."""
        self.ask(Emit(what, rank))

    def start(self, world: World, *, is_seated: bool = False) -> Hand:
        """Start one more process, where there is most room, or where it says that it is."""
        world = world if is_seated else self._fleet.seat(world, self.crew)
        if world.role == Role.COORDINATOR:
            self.first_world = world  # Whoever comes later looks for it there.
        return self._start(world)

    def promote(self, hand: Hand, world: World) -> World:
        """Let a process that lives be the coordinator, at its own host."""
        self.first_world = world = self._fleet.seat_at(world, hand.host)
        hand.role, hand.global_rank, hand.node, hand.state = (
            world.role,
            world.global_rank,
            world.node,
            State.STARTING,
        )
        return world

    def _start(self, world: World) -> Hand:
        hand = self.crew.welcome(world, self.now)
        self.ask(StartProcess(hand.number, world))
        return hand

    def say(self, hand: Hand, word: Told) -> None:
        """Say something to a process; where it has ended meanwhile, that is about to be told."""
        self.ask(Say(hand.number, word))

    def signal(self, hand: Hand, signum: int) -> None:
        """Send a signal to a process."""
        self.ask(Signal(hand.number, signum))

    def answer(self, request: ScaleRequest, answer: ScaleAnswered) -> None:
        """Say what becomes of what was asked for."""
        self.ask(Answer(request.number, answer))

    def fail(self, failure: Failure) -> None:
        """Let the run fail, once others had a moment to say what they know about it."""
        self._failures.append(failure)
        judge_at = self.now + (_SETTLE_S if failure.doubt else 0.0)
        self._judge_at = judge_at if self._judge_at is None else min(self._judge_at, judge_at)

    # What becomes of hosts.

    def _lose_host(self, lost: HostLost) -> None:
        """One event: all of its processes have ended."""
        if (host := self._fleet.lose(lost.host)) is None:
            return
        gone = [hand for hand in self.crew.living() if hand.host == lost.host]
        self.emit(HostGone(name=host.name, reason=lost.text, processes=len(gone)))
        if not self._fleet.left:
            self.take(HostFailed(lost.text), self.now)
        self._host_scaling.host_lost(lost.host, self._fleet)
        for hand in gone:
            end = Ended(process=hand.number, exit_code=-signal.SIGKILL, lost_host=host.name, lost_why=lost.text)
            self.take(end, self.now)
        self._succession.hosts_are(len(self._fleet.left), f"host {host.name} is gone")

    # How the run ends before its time.

    def _heed_interrupt(self) -> None:
        if self.job.purpose in _READING:
            self._end(Interrupted("Stopped on request."))
        elif self.is_stopping:
            self._end(Interrupted("The run was ended at once, on the second request; what was not saved is lost."))
        else:
            self.is_stopping = True
            self._stop_asked_at = self.now
            self.emit(Warned(text="stopping after this step; Ctrl-C again ends at once"))
            for hand in self.crew.living(Role.WORKER):
                self.say(hand, Stop())

    @property
    def _stop_by(self) -> float | None:
        """Until when the workers may take to stop; None where nobody has asked them to."""
        if self._stop_asked_at is None:
            return None
        saves = any(hand.life.is_saving for hand in self.crew.living(Role.WORKER))
        return self._stop_asked_at + (_SAVE_S if saves else _STOP_S)

    def _check_stop(self) -> None:
        if (stop_by := self._stop_by) is not None and self.now > stop_by:
            assert self._stop_asked_at is not None
            seconds = self.now - self._stop_asked_at
            self._end(
                Interrupted(f"The workers did not stop within {seconds:.0f} s of the request and were ended.")
            )

    def _judge(self) -> None:
        """Some time after the first failure: end the others, and tell the one that caused it all."""
        if self._judge_at is None or self.over is not None:
            return
        if self._cause is None:
            if self.now < self._judge_at and any(self.crew.living(Role.WORKER)):
                return
            self._cause, self._end_by = first_cause(self._failures), self.now + _GRACE_S
            for hand in self.crew.living():
                self.signal(hand, signal.SIGTERM)
        if self.now >= self._end_by or not any(self.crew.living()):
            self._end(self._cause.error)

    def _end(self, error: Exception | None) -> None:
        if isinstance(error, WorkerFailed):
            self.emit(Failed(message=str(error), traceback=error.details), error.global_rank)
        if self._tells_what_never_fired:
            self._timetable.tell_open(self.emit)
        self.over = Over(self.results.values, error)
