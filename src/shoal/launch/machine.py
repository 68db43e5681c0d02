"""The supervisor's machine: what happens goes in with the time, what is to be done comes out. No I/O.

`Supervisor` drives it: it waits until something happens or `next_deadline` has come, tells the machine, and
carries out what it asks for, until the run is `over`.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Sequence
from typing import Any

from shoal.errors import Interrupted, LaunchError, WorkerFailed
from shoal.launch.chaos import Mischief, Timetable
from shoal.launch.crew import Crew, Hand
from shoal.launch.deaths import explain_death
from shoal.launch.membership import Membership
from shoal.launch.messages import (
    Answer,
    Deaf,
    Emit,
    Ended,
    HostFailed,
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
from shoal.launch.places import describe_world, servers_of
from shoal.launch.service import Service
from shoal.launch.succession import Succession
from shoal.launch.verdict import Failure, first_cause
from shoal.launch.vigil import Vigil
from shoal.observe.worker_scales import WorkerScales
from shoal.spec import Job, World

_SETTLE_S = 0.3
"""How long to wait after a failure for others, so that the cause is shown and not what it caused."""
_GRACE_S = 2.0
"""How long the others may take to end then."""
_STOP_S = 120.0
"""How long workers may take to finish their step, once asked."""
_SAVE_S = 600.0
"""The same while one of them saves: what is on its way to a slow disk is what the request is about to keep."""
_READING = ("evaluate", "predict", "inspect")
"""Purposes that keep nothing worth waiting for."""


class SupervisorMachine:
    """Decides about one run, from its first process to its end.

    Who follows a process that ends, and when the run is over, is decided by a `Succession`, to which this class
    is the `Bridge`.
    """

    def __init__(
        self,
        job: Job,
        places: Sequence[World],
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
        self.results: dict[str, Any] = {}
        self.first_place = places[0]
        self._num_workers = sum(place.role == "worker" for place in places)
        self._scales = WorkerScales()
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
        self._succession: Succession = Service(self) if servers_of(job) else Membership(self)
        for place in places:
            self.start(place)

    def take(self, news: Input, now: float) -> None:
        """Something has happened."""
        self.now = now
        if isinstance(news, Ended):
            self.crew.hands[news.process].end = news
        if self.over is not None or (self._cause is not None and not isinstance(news, HostFailed)):
            # Whoever would begin again must know that the user does not want that.
            self.is_stopping = self.is_stopping or isinstance(news, Interrupt)
            return
        match news:
            case Said():
                self._hear(self.crew.hands[news.process], dict(news.message))
            case Started():
                hand = self.crew.hands[news.process]
                hand.is_started, hand.life.heard_at = True, now
            case Deaf():
                self.crew.hands[news.process].is_deaf = True
            case Ended():
                self._succession.notice_end(self.crew.hands[news.process])
            case ScaleRequest():
                self._succession.scale(news)
            case Interrupt():
                self._heed_interrupt()
            case StacksTaken():
                self._vigil.conclude(news)
            case Load():
                self._succession.hear_load(news)
            case HostFailed():
                self._end(LaunchError(news.text) if self._cause is None else _error(self._cause))

    def act(self, now: float) -> None:
        """Do what is due."""
        self.now = now
        if self._cause is None and self.over is None:
            self._vigil.act()
            self._check_stop()
            self._mischief.act()
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
        ]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    # What processes say.

    def _hear(self, hand: Hand, message: dict[str, Any]) -> None:
        self.crew.note_life(hand, message, self.now)
        self._mischief.note(hand, message)
        kind = message.pop("kind")
        if kind == "failed":
            self._hear_failure(hand, message)
            return
        self._succession.hear(hand, kind, message)
        if hand.is_worker:
            self._pass_on(hand, kind, message)

    def _pass_on(self, hand: Hand, kind: str, values: dict[str, Any]) -> None:
        if kind == "done":
            hand.is_done = True
            if hand.global_rank == 0:
                if self.crew.last_loss is not None:  # Who followed another at the very end has seen none itself.
                    values["results"].setdefault("loss", self.crew.last_loss)
                self.results.update(values["results"])
            self.results |= self._scales.note(hand.global_rank, values["results"])
        self.emit(kind, hand.global_rank, values)
        if not self._world_told and self.crew.all_ready():
            self._world_told = True
            self.emit("world", None, describe_world(self.job, self._num_workers))

    def _hear_failure(self, hand: Hand, message: dict[str, Any]) -> None:
        hand.has_reported_failure = True
        failure = Failure(
            message=message["message"],
            global_rank=hand.rank,
            details=message["traceback"],
            consequence=message.get("consequence", False),
            is_transient=message.get("consequence", False),
        )
        self._succession.hear_failure(hand, failure)

    # What the parts of this machine ask for.

    @property
    def has_failed(self) -> bool:
        """Whether the run is ending because something failed."""
        return bool(self._failures)

    def ask(self, output: Output) -> None:
        """Let this be done, after all that was asked before."""
        self.outputs.append(output)

    def emit(self, kind: str, global_rank: int | None, values: dict[str, Any]) -> None:
        """Tell whoever watches."""
        self.ask(Emit(kind, global_rank, values))

    def start(self, place: World) -> Hand:
        """Start one more process."""
        hand = self.crew.welcome(place, self.now)
        self.ask(StartProcess(hand.number, place))
        return hand

    def say(self, hand: Hand, message: dict[str, Any]) -> None:
        """Say something to a process; where it has ended meanwhile, that is about to be told."""
        self.ask(Say(hand.number, message))

    def signal(self, hand: Hand, signum: int) -> None:
        """Send a signal to a process."""
        self.ask(Signal(hand.number, signum))

    def answer(self, request: ScaleRequest, text: str, **facts: Any) -> None:
        """What was asked for is done, or will be."""
        self.ask(Answer(request.number, {"kind": "scaled", "text": text, **facts}))

    def refuse(self, request: ScaleRequest, text: str) -> None:
        """What was asked for will not be done, for this reason."""
        self.ask(Answer(request.number, {"kind": "refused", "text": text}))

    def explain(self, hand: Hand) -> str:
        """One sentence about a process that has ended without a word of its own."""
        if hand.hang:
            return f"{hand.name.capitalize()} hung and was ended: {hand.hang}."
        assert hand.end is not None
        return explain_death(hand.name, hand.end)

    def failure_of(self, hand: Hand, message: str) -> Failure:
        """The end of this process as a failure of the run."""
        assert hand.end is not None
        code = hand.end.exit_code
        return Failure(
            message=message,
            global_rank=hand.rank,
            details=hand.end.last_output,
            signum=-code if code < 0 else None,
            exit_code=code if code >= 0 else 128 - code,
            is_transient=code < 0 or bool(hand.complaint),
        )

    def fail(self, failure: Failure) -> None:
        """Let the run fail, once others had a moment to say what they know about it."""
        self._failures.append(failure)
        judge_at = self.now + (_SETTLE_S if failure.doubt else 0.0)
        self._judge_at = judge_at if self._judge_at is None else min(self._judge_at, judge_at)

    # How the run ends before its time.

    def _heed_interrupt(self) -> None:
        if self.job.purpose in _READING:
            self._end(Interrupted("Stopped on request."))
        elif self.is_stopping:
            self._end(Interrupted("The run was ended at once, on the second request; what was not saved is lost."))
        else:
            self.is_stopping = True
            self._stop_asked_at = self.now
            self.emit("warning", None, {"text": "stopping after this step; Ctrl-C again ends at once"})
            for hand in self.crew.living("worker"):
                self.say(hand, {"kind": "stop"})

    @property
    def _stop_by(self) -> float | None:
        """Until when the workers may take to stop; None where nobody has asked them to."""
        if self._stop_asked_at is None:
            return None
        saves = any(hand.life.is_saving for hand in self.crew.living("worker"))
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
            if self.now < self._judge_at and any(self.crew.living("worker")):
                return
            self._cause, self._end_by = first_cause(self._failures), self.now + _GRACE_S
            for hand in self.crew.living():
                self.signal(hand, signal.SIGTERM)
        if self.now >= self._end_by or not any(self.crew.living()):
            self._end(_error(self._cause))

    def _end(self, error: Exception | None) -> None:
        if isinstance(error, WorkerFailed):
            self.emit("failed", error.global_rank, {"message": str(error), "traceback": error.details})
        if self._tells_what_never_fired:
            self._timetable.tell_open(self.emit)
        self.over = Over(self.results, error)


def _error(cause: Failure) -> WorkerFailed:
    return WorkerFailed(
        cause.message,
        global_rank=cause.global_rank,
        details=cause.details,
        exit_code=cause.exit_code,
        is_transient=cause.is_transient,
    )
