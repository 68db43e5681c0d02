"""The supervisor: starts a job's processes, passes on what they say, and decides when one of them ends."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal.errors import Interrupted, LaunchError, PeerLost, WorkerFailed
from shoal.launch.crew import Crew, Hand, Vacancy
from shoal.launch.deaths import MemoryWatch, explain_death
from shoal.launch.engine import Engine, Handle, Member
from shoal.launch.interrupts import Interrupts
from shoal.launch.local import LocalEngine
from shoal.launch.owner import ZygoteProcess
from shoal.launch.places import describe_world, plan_places, spare_place
from shoal.launch.verdict import Failure, first_cause
from shoal.observe.events import Event
from shoal.spec import Job

HANG_TIMEOUT_S = 30.0
_SETTLE_S = 0.3
"""How long to wait after a failure for others, so that the cause is shown and not what it caused."""
_GRACE_S = 2.0
_STOP_S = 120.0
"""How long workers may take to finish their step and save, once asked."""
_READING = ("evaluate", "predict", "inspect")
"""Purposes that keep nothing worth waiting for."""
_STOP_SIGNALS = (-signal.SIGINT, -signal.SIGTERM)


class Supervisor:
    """Runs one job, once. One loop over all channels; no threads."""

    def __init__(
        self,
        job: Job,
        on_event: Callable[[Event], None],
        engine: Engine | None = None,
        *,
        hang_timeout_s: float = HANG_TIMEOUT_S,
    ) -> None:
        self._job = job
        self._on_event = on_event
        self._engine = engine or LocalEngine()
        self._hang_timeout_s = hang_timeout_s
        self._crew = Crew()
        self._memory = MemoryWatch()
        self._selector = selectors.DefaultSelector()
        self._failures: list[Failure] = []
        self._judge_at: float | None = None
        self._world_told = False
        self._stopping = False
        self._stop_by: float | None = None
        self._results: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """Run the job to its end; the results of its first worker."""
        places = plan_places(self._job)
        self._address = places[0].coordinator
        with self._selector, Interrupts() as interrupts:
            self._handle: Handle = self._engine.start(self._job, places)
            try:
                self._selector.register(interrupts, selectors.EVENT_READ)
                self._selector.register(self._handle, selectors.EVENT_READ)
                for member in self._handle.members:
                    self._welcome(member)
                self._watch(interrupts)
            finally:
                self._handle.close()
        if self._stopping:
            raise Interrupted("The run was stopped on request, after the step it was in.")
        return self._results

    def _watch(self, interrupts: Interrupts) -> None:
        while any(self._crew.living(workers=True)) or self._crew.vacancies:
            ready = self._selector.select(self._seconds_to_deadline())
            # Words before deaths: the last word of a process explains its end.
            for key, _ in ready:
                if isinstance(key.data, Hand):
                    self._hear(key.data)
            for member in self._handle.collect():
                self._notice(self._crew.hand_of(member))
            self._end_the_silent()
            self._heed(interrupts)
            self._fill_vacancies()
            self._judge()
        self._judge()

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [self._judge_at, self._stop_by, self._crew.next_silence(self._hang_timeout_s)]
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    # What processes say.

    def _welcome(self, member: Member) -> None:
        hand = Hand(member, heard_at=time.monotonic())
        self._crew.hands.append(hand)
        self._selector.register(member.channel, selectors.EVENT_READ, hand)

    def _hear(self, hand: Hand) -> None:
        if hand.member.channel.fileno() not in self._selector.get_map():
            return
        try:
            while (message := hand.member.channel.poll()) is not None:
                self._crew.note_life(hand, message, time.monotonic())
                self._take(hand, message)
        except PeerLost:
            # Its end is told by the engine; the socket would only keep waking us.
            self._selector.unregister(hand.member.channel)

    def _take(self, hand: Hand, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "failed":
            self._take_failure(hand, message)
        elif hand.is_worker:
            self._take_news(hand, kind, message)
        elif kind in ("line", "warning"):
            self._emit(kind, None, message)

    def _take_news(self, hand: Hand, kind: str, values: dict[str, Any]) -> None:
        global_rank = hand.member.global_rank
        if kind == "done":
            hand.is_done = True
            if global_rank == 0:
                self._results = values["results"]
        if kind == "state" and (place := hand.succeeds) is not None:
            hand.succeeds = None
            seconds = time.monotonic() - place.lost_at
            self._emit("replaced", global_rank, {"rank": global_rank, "spare": place.spare, "seconds": seconds})
        self._emit(kind, global_rank, values)
        if not self._world_told and self._crew.all_ready():
            self._world_told = True
            self._emit("world", None, describe_world(self._job))

    def _take_failure(self, hand: Hand, message: dict[str, Any]) -> None:
        hand.has_reported_failure = True
        if not hand.is_worker:
            self._emit("warning", None, {"text": f"{hand.member.name} failed: {message['message']}"})
            return
        self._fail(
            Failure(
                global_rank=hand.member.global_rank,
                message=message["message"],
                details=message["traceback"],
                consequence=message.get("consequence", False),
            )
        )

    def _emit(self, kind: str, global_rank: int | None, values: dict[str, Any]) -> None:
        self._on_event(Event(kind, global_rank, values, time.time()))

    # What becomes of them.

    def _notice(self, hand: Hand) -> None:
        """It has been started, or has ended."""
        if hand.member.is_alive:
            hand.heard_at = time.monotonic()
            return
        self._hear(hand)
        if not hand.is_worker:
            self._lose_spare(hand)
        elif not hand.has_reported_failure and not self._ended_well(hand):
            self._lose_worker(hand)

    def _ended_well(self, hand: Hand) -> bool:
        code = hand.member.exit_code
        assert code is not None
        is_script = self._job.purpose == "script"
        if self._stopping and (code in _STOP_SIGNALS or code == 0 or (is_script and code > 0)):
            return True
        return code == 0 and (hand.is_done or is_script)

    def _lose_worker(self, hand: Hand) -> None:
        member, code = hand.member, hand.member.exit_code
        assert code is not None
        if hand.is_done:
            self._emit("warning", member.global_rank, {"text": f"after its work was done: {self._reason(hand)}"})
            return
        failure = Failure(
            global_rank=member.global_rank,
            message=self._reason(hand),
            details=self._handle.last_output(member),
            signum=-code if code < 0 else None,
            exit_code=code if code >= 0 else 128 - code,
        )
        if code >= 0 or not self._job.cluster.spares or self._failures or not self._may_go_on():
            self._fail(failure)
            return
        self._emit("lost", member.global_rank, {"rank": member.global_rank, "reason": failure.message})
        self._crew.vacancies.append(Vacancy(member.global_rank, time.monotonic(), failure))

    def _lose_spare(self, hand: Hand) -> None:
        if not hand.has_reported_failure:
            self._emit("warning", None, {"text": self._reason(hand)})
        if not hand.has_reported_failure and self._may_go_on():
            self._add_spare()

    def _may_go_on(self) -> bool:
        """Whether to replace one more: not for ever where each successor dies without a step forward."""
        self._crew.fruitless_losses += 1
        return self._crew.fruitless_losses <= self._job.cluster.workers + 2

    def _reason(self, hand: Hand) -> str:
        if hand.silent_for_s is not None:
            return (
                f"{hand.member.name.capitalize()} gave no sign of life for {hand.silent_for_s:.0f} s (it "
                "hangs, or was suspended) and was ended."
            )
        return explain_death(hand.member, ran_out_of_memory=self._memory.ran_out())

    def _end_the_silent(self) -> None:
        now = time.monotonic()
        for hand in self._crew.silent(now, self._hang_timeout_s):
            hand.silent_for_s = now - hand.heard_at
            self._handle.signal(hand.member, signal.SIGKILL)

    # What follows from it.

    def _fill_vacancies(self) -> None:
        for vacancy in list(self._crew.vacancies):
            if (spare := self._crew.ready_spare()) is not None:
                self._hand_over(vacancy, spare)
            elif not any(self._crew.living(workers=False)):
                self._crew.vacancies.remove(vacancy)
                self._fail(vacancy.failure)

    def _hand_over(self, vacancy: Vacancy, spare: Hand) -> None:
        generation = self._crew.generation + 1
        spare.state = "called"
        try:
            spare.member.channel.send({"kind": "takeover", "rank": vacancy.global_rank, "generation": generation})
            if self._stopping:
                spare.member.channel.send({"kind": "stop"})
        except PeerLost:
            return  # The engine will tell of its end; the vacancy waits for another.
        self._crew.generation = generation
        self._crew.vacancies.remove(vacancy)
        spare.succeeds = replace(vacancy, spare=spare.member.global_rank)
        spare.member.role, spare.member.global_rank = "worker", vacancy.global_rank
        self._add_spare()

    def _add_spare(self) -> None:
        number = len(self._crew.hands) - self._job.cluster.workers
        place = spare_place(self._job, number, self._address, self._crew.generation)
        self._welcome(self._handle.add(place))

    def _heed(self, interrupts: Interrupts) -> None:
        interrupts.clear()
        if interrupts.count and self._job.purpose in _READING:
            raise Interrupted("Stopped on request.")
        if interrupts.count > 1:
            raise Interrupted("The run was ended at once, on the second request; what was not saved is lost.")
        if self._stop_by is not None and time.monotonic() > self._stop_by:
            raise Interrupted(f"The workers did not stop within {_STOP_S:.0f} s of the request and were ended.")
        if interrupts.count == 1 and not self._stopping:
            self._stopping = True
            self._stop_by = time.monotonic() + _STOP_S
            self._emit("warning", None, {"text": "stopping after this step; Ctrl-C again ends at once"})
            for hand in self._crew.living(workers=True):
                try:
                    hand.member.channel.send({"kind": "stop"})
                except PeerLost:
                    pass  # It is ending already.

    def _fail(self, failure: Failure) -> None:
        self._failures.append(failure)
        if self._judge_at is None:
            self._judge_at = time.monotonic() + _SETTLE_S

    def _judge(self) -> None:
        """Some time after the first failure: end the others, and raise the one that caused it all."""
        if self._judge_at is None:
            return
        if time.monotonic() < self._judge_at and any(self._crew.living(workers=True)):
            return
        cause = first_cause(self._failures)
        for member in self._handle.members:
            self._handle.signal(member, signal.SIGTERM)
        try:
            self._handle.wait(_GRACE_S)
        except LaunchError:
            pass  # Whatever this is, it came after the cause.
        self._emit("failed", cause.global_rank, {"message": cause.message, "traceback": cause.details})
        raise WorkerFailed(
            cause.message, global_rank=cause.global_rank, details=cause.details, exit_code=cause.exit_code
        )


def run_job(job: Job, on_event: Callable[[Event], None], zygote: ZygoteProcess | None = None) -> dict[str, Any]:
    """Run a job on this host to its end; its results."""
    return Supervisor(job, on_event, LocalEngine(zygote)).run()
