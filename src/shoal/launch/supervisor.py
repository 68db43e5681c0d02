"""The supervisor: starts a job's processes, passes on what they say, and ends the run when one of them fails."""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

from shoal.errors import Interrupted, LaunchError, PeerLost, WorkerFailed
from shoal.launch.chaos import Mischief
from shoal.launch.control import ControlSocket
from shoal.launch.crew import Crew, Hand
from shoal.launch.deaths import MemoryWatch, explain_death
from shoal.launch.engine import Engine, Handle, Member
from shoal.launch.hangs import Life
from shoal.launch.interrupts import Interrupts
from shoal.launch.local import LocalEngine
from shoal.launch.membership import Membership
from shoal.launch.owner import ZygoteProcess
from shoal.launch.places import describe_world, plan_places, servers_of
from shoal.launch.service import Service
from shoal.launch.succession import Succession
from shoal.launch.verdict import Failure, first_cause
from shoal.launch.vigil import Vigil
from shoal.observe.events import Event
from shoal.observe.worker_scales import WorkerScales
from shoal.spec import Job, World

_SETTLE_S = 0.3
"""How long to wait after a failure for others, so that the cause is shown and not what it caused."""
_GRACE_S = 2.0
_STOP_S = 120.0
"""How long workers may take to finish their step and save, once asked."""
_READING = ("evaluate", "predict", "inspect")
"""Purposes that keep nothing worth waiting for."""


class Supervisor:
    """Runs one job, once. One loop over all channels; no threads.

    Who follows a process that ends, and when the run is over, is decided by a `Succession`, to which this class
    is the `Bridge`.
    """

    def __init__(
        self,
        job: Job,
        on_event: Callable[[Event], None],
        engine: Engine | None = None,
        *,
        hang_timeout_s: float | None = None,
    ) -> None:
        self.job = job
        self.crew = Crew()
        self.is_stopping = False
        self.results: dict[str, Any] = {}
        self._scales = WorkerScales()
        self._on_event = on_event
        self._engine = engine or LocalEngine()
        # Who was asked to be quiet does not hang because of that.
        self._hang_timeout_s = math.inf if job.options.get("quiet") else hang_timeout_s
        self._memory = MemoryWatch()
        self._selector = selectors.DefaultSelector()
        self._failures: list[Failure] = []
        self._judge_at: float | None = None
        self._world_told = False
        self._stop_by: float | None = None
        self._control: ControlSocket | None = None
        self._succession: Succession = Service(self) if servers_of(job) else Membership(self)

    def run(self) -> dict[str, Any]:
        """Run the job to its end; the results of its first worker, and what the coordinator counted."""
        places = plan_places(self.job)
        self.first_place: World = places[0]
        self._num_workers = sum(place.role == "worker" for place in places)
        with self._selector, Interrupts() as interrupts, ExitStack() as at_end:
            if servers_of(self.job) and not self.job.run_dir:
                # A coordinator's memory outlives it, so that its successor can go on.
                scratch = at_end.enter_context(TemporaryDirectory(prefix="shoal-"))
                self.job = replace(self.job, options={**self.job.options, "scratch": scratch})
            self._handle: Handle = self._engine.start(self.job, places)
            at_end.callback(self._handle.close)
            self._vigil = Vigil(self, self._handle.signal, unmeasured_s=self._hang_timeout_s)
            self._mischief = Mischief(self.job, self.crew, self.emit, self._handle.signal)
            at_end.callback(self._mischief.tell_open)
            self._selector.register(interrupts, selectors.EVENT_READ)
            self._selector.register(self._handle, selectors.EVENT_READ)
            if self.job.run_dir:
                self._control = ControlSocket(self.job.run_dir)
                at_end.callback(self._control.close)
                self._selector.register(self._control, selectors.EVENT_READ)
            for member in self._handle.members:
                self._welcome(member)
            self._watch(interrupts)
        if self.is_stopping:
            raise Interrupted("The run was stopped on request, after the step it was in.")
        return self.results

    def _watch(self, interrupts: Interrupts) -> None:
        while not self._succession.is_over():
            ready = self._selector.select(self._seconds_to_deadline())
            # Words before deaths: the last word of a process explains its end.
            for key, _ in ready:
                if isinstance(key.data, Hand):
                    self._hear(key.data)
            for member in self._handle.collect():
                self._notice(self.crew.hand_of(member))
            for request in self._control.collect() if self._control is not None else ():
                self._succession.scale(request)
            self._vigil.act()
            self._heed(interrupts)
            self._mischief.act(time.monotonic())
            self._succession.act()
            self._judge()
        self._judge()

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [
            self._judge_at,
            self._stop_by,
            self._vigil.next_deadline(),
            self._succession.next_deadline(),
            self._mischief.next_deadline(time.monotonic()),
        ]
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    # What processes say.

    def _welcome(self, member: Member) -> Hand:
        hand = Hand(member, Life(time.monotonic()))
        self.crew.hands.append(hand)
        self._selector.register(member.channel, selectors.EVENT_READ, hand)
        return hand

    def _hear(self, hand: Hand) -> None:
        if hand.member.channel.fileno() not in self._selector.get_map():
            return
        try:
            while (message := hand.member.channel.poll()) is not None:
                self.crew.note_life(hand, message, time.monotonic())
                self._mischief.note(hand, message, time.monotonic())
                self._take(hand, message)
        except PeerLost:
            # Its end is told by the engine; the socket would only keep waking us.
            self._selector.unregister(hand.member.channel)

    def _take(self, hand: Hand, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "failed":
            self._take_failure(hand, message)
            return
        if kind == "stacks":
            self._vigil.note_stacks(hand, message)
            return
        self._succession.hear(hand, kind, message)
        if hand.is_worker:
            self._take_news(hand, kind, message)

    def _take_news(self, hand: Hand, kind: str, values: dict[str, Any]) -> None:
        global_rank = hand.member.global_rank
        if kind == "done":
            hand.is_done = True
            if global_rank == 0:
                self.results.update(values["results"])
            self.results |= self._scales.note(global_rank, values["results"])
        self.emit(kind, global_rank, values)
        if not self._world_told and self.crew.all_ready():
            self._world_told = True
            self.emit("world", None, describe_world(self.job, self._num_workers))

    def _take_failure(self, hand: Hand, message: dict[str, Any]) -> None:
        hand.has_reported_failure = True
        failure = Failure(
            message=message["message"],
            global_rank=hand.member.global_rank if hand.is_worker else None,
            details=message["traceback"],
            consequence=message.get("consequence", False),
        )
        self._succession.hear_failure(hand, failure)

    # What becomes of them.

    def _notice(self, hand: Hand) -> None:
        """It has been started, or has ended."""
        if hand.member.is_alive:
            hand.life.heard_at = time.monotonic()
            return
        self._hear(hand)
        self._succession.notice_end(hand)

    # What a succession asks for.

    @property
    def has_failed(self) -> bool:
        """Whether the run is ending because something failed."""
        return bool(self._failures)

    def emit(self, kind: str, global_rank: int | None, values: dict[str, Any]) -> None:
        """Tell whoever watches."""
        self._on_event(Event(kind, global_rank, values, time.time()))

    def start(self, place: World) -> Hand:
        """Start one more process."""
        return self._welcome(self._handle.add(place))

    def kill(self, hand: Hand) -> None:
        """End a process at once."""
        self._handle.signal(hand.member, signal.SIGKILL)

    def explain(self, hand: Hand) -> str:
        """One sentence about a process that has ended without a word of its own. Ask once."""
        if hand.hang:
            return f"{hand.member.name.capitalize()} hung and was ended: {hand.hang}."
        return explain_death(hand.member, ran_out_of_memory=self._memory.ran_out())

    def failure_of(self, hand: Hand, message: str) -> Failure:
        """The end of this process as a failure of the run."""
        code = hand.member.exit_code
        assert code is not None
        return Failure(
            message=message,
            global_rank=hand.member.global_rank if hand.is_worker else None,
            details=self._handle.last_output(hand.member),
            signum=-code if code < 0 else None,
            exit_code=code if code >= 0 else 128 - code,
        )

    def fail(self, failure: Failure) -> None:
        """Let the run fail, once others had a moment to say what they know about it."""
        self._failures.append(failure)
        if self._judge_at is None:
            self._judge_at = time.monotonic() + _SETTLE_S

    # How the run ends before its time.

    def _heed(self, interrupts: Interrupts) -> None:
        interrupts.clear()
        if interrupts.count and self.job.purpose in _READING:
            raise Interrupted("Stopped on request.")
        if interrupts.count > 1:
            raise Interrupted("The run was ended at once, on the second request; what was not saved is lost.")
        if self._stop_by is not None and time.monotonic() > self._stop_by:
            raise Interrupted(f"The workers did not stop within {_STOP_S:.0f} s of the request and were ended.")
        if interrupts.count == 1 and not self.is_stopping:
            self.is_stopping = True
            self._stop_by = time.monotonic() + _STOP_S
            self.emit("warning", None, {"text": "stopping after this step; Ctrl-C again ends at once"})
            for hand in self.crew.living("worker"):
                try:
                    hand.member.channel.send({"kind": "stop"})
                except PeerLost:
                    pass  # It is ending already.

    def _judge(self) -> None:
        """Some time after the first failure: end the others, and raise the one that caused it all."""
        if self._judge_at is None:
            return
        if time.monotonic() < self._judge_at and any(self.crew.living("worker")):
            return
        cause = first_cause(self._failures)
        for member in self._handle.members:
            self._handle.signal(member, signal.SIGTERM)
        try:
            self._handle.wait(_GRACE_S)
        except LaunchError:
            pass  # Whatever this is, it came after the cause.
        self.emit("failed", cause.global_rank, {"message": cause.message, "traceback": cause.details})
        raise WorkerFailed(
            cause.message, global_rank=cause.global_rank, details=cause.details, exit_code=cause.exit_code
        )


def run_job(job: Job, on_event: Callable[[Event], None], zygote: ZygoteProcess | None = None) -> dict[str, Any]:
    """Run a job on this host to its end; its results."""
    return Supervisor(job, on_event, LocalEngine(zygote)).run()
