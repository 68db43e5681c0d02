"""Workers, and the spares that take the places of those that are killed."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from typing import Any

from shoal.errors import PeerLost
from shoal.launch.control import ScaleRequest
from shoal.launch.crew import Hand, Vacancy
from shoal.launch.places import member_place
from shoal.launch.succession import Bridge
from shoal.launch.verdict import Failure
from shoal.observe.wording import plural

STOP_SIGNALS = (-signal.SIGINT, -signal.SIGTERM)


class Spares:
    """The succession of a job without servers: a spare follows a killed worker, while there are any."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._crew = bridge.crew

    def is_over(self) -> bool:
        """Whether all workers have ended, and none is to be replaced."""
        return not any(self._crew.living("worker")) and not self._crew.vacancies

    def act(self) -> None:
        """Hand free places to spares that are ready."""
        for vacancy in list(self._crew.vacancies):
            if (spare := self._crew.ready_spare()) is not None:
                self._hand_over(vacancy, spare)
            elif not any(self._crew.living("spare")):
                self._crew.vacancies.remove(vacancy)
                self._bridge.fail(vacancy.failure)

    def next_deadline(self) -> float | None:
        """Nothing here is bound to a time."""
        return None

    def hear(self, hand: Hand, kind: str, values: dict[str, Any]) -> None:
        """A successor speaks for the first time; or a spare has something to tell."""
        if not hand.is_worker:
            if kind in ("line", "warning"):
                self._bridge.emit(kind, None, values)
        elif kind == "state" and (place := hand.succeeds) is not None:
            hand.succeeds = None
            told = {
                "rank": place.global_rank,
                "spare": place.spare,
                "seconds": time.monotonic() - place.lost_at,
            }
            self._bridge.emit("replaced", place.global_rank, told)

    def hear_failure(self, hand: Hand, failure: Failure) -> None:
        """A worker's failure is the run's; a spare's is not."""
        if hand.is_worker:
            self._bridge.fail(failure)
        else:
            self._bridge.emit("warning", None, {"text": f"{hand.member.name} failed: {failure.message}"})

    def notice_end(self, hand: Hand) -> None:
        """A process has ended: well, or to be replaced, or for good."""
        if not hand.is_worker:
            self._lose_spare(hand)
        elif not hand.has_reported_failure and not self._ended_well(hand):
            self._lose_worker(hand)

    def scale(self, request: ScaleRequest) -> None:
        """Nobody can be added: each worker's part of the work is fixed."""
        workers = len(list(self._crew.living("worker")))
        if request.is_question:
            request.answer(f"{plural(workers, 'worker')}.", workers=workers, servers=0)
        else:
            request.refuse(
                f"This run's strategy is {self._bridge.job.strategy}, whose workers stay the same from the first "
                "step to the last; only runs of strategy ps can be scaled."
            )

    def _ended_well(self, hand: Hand) -> bool:
        code = hand.member.exit_code
        assert code is not None
        is_script = self._bridge.job.purpose == "script"
        if self._bridge.is_stopping and (code in STOP_SIGNALS or code == 0 or (is_script and code > 0)):
            return True
        return code == 0 and (hand.is_done or is_script)

    def _lose_worker(self, hand: Hand) -> None:
        member, reason = hand.member, self._bridge.explain(hand)
        assert member.exit_code is not None
        if hand.is_done:
            text = f"after its work was done: {reason}"
            self._bridge.emit("warning", member.global_rank, {"text": text})
            return
        failure = self._bridge.failure_of(hand, reason)
        has_spares = self._bridge.job.cluster.spares > 0
        if member.exit_code >= 0 or not has_spares or self._bridge.has_failed or not self._may_go_on():
            self._bridge.fail(failure)
            return
        self._bridge.emit("lost", member.global_rank, {"rank": member.global_rank, "reason": reason})
        self._crew.vacancies.append(Vacancy(member.global_rank, time.monotonic(), failure))

    def _lose_spare(self, hand: Hand) -> None:
        if hand.has_reported_failure:
            return
        self._bridge.emit("warning", None, {"text": self._bridge.explain(hand)})
        if self._may_go_on():
            self._add_spare()

    def _may_go_on(self) -> bool:
        """Whether to replace one more: not for ever where each successor dies without a step forward."""
        self._crew.fruitless_losses += 1
        return self._crew.fruitless_losses <= self._bridge.job.cluster.workers + 2

    def _hand_over(self, vacancy: Vacancy, spare: Hand) -> None:
        generation = self._crew.generation + 1
        spare.state = "called"
        try:
            spare.member.channel.send({"kind": "takeover", "rank": vacancy.global_rank, "generation": generation})
            if self._bridge.is_stopping:
                spare.member.channel.send({"kind": "stop"})
        except PeerLost:
            return  # The engine will tell of its end; the vacancy waits for another.
        self._crew.generation = generation
        self._crew.vacancies.remove(vacancy)
        spare.succeeds = replace(vacancy, spare=spare.member.global_rank)
        spare.member.role, spare.member.global_rank = "worker", vacancy.global_rank
        self._add_spare()

    def _add_spare(self) -> None:
        number = len(self._crew.hands) - self._bridge.job.cluster.workers
        generation = self._crew.generation
        self._bridge.start(member_place(self._bridge.first_place, "spare", number, generation=generation))
