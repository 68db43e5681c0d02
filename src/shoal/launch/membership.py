"""A run without servers: its places, the workers that host them, and the spares that wait for some."""

from __future__ import annotations

import signal
from dataclasses import replace

from shoal.comm.words import ScaleAnswered
from shoal.launch.crew import Hand, Vacancy
from shoal.launch.elastic import Autoscaler
from shoal.launch.failure_log import FailureLog, verdict
from shoal.launch.messages import Load, MeasureLoad, ScaleRequest
from shoal.launch.moves import PlaceMoves
from shoal.launch.redealing import Redealing
from shoal.launch.resizing import Resizing
from shoal.launch.scaling import BEGUN, ENDING, refusal
from shoal.launch.succession import Bridge
from shoal.launch.verdict import Failure, explain_end, failure_of
from shoal.launch.worlds import advice_after_loss, can_move, can_replace
from shoal.observe.happenings import Adopted, LineSaid, Lost, Raised, Released, Replaced, StepsTaken, Warned
from shoal.observe.wording import plural
from shoal.spec.host_facts import HostFacts
from shoal.spec.told import Told
from shoal.spec.vocabulary import Purpose, Role

STOP_SIGNALS = (-signal.SIGINT, -signal.SIGTERM)


class Membership:
    """The succession of a job without servers. Whoever dies or raises leaves places, and others go on with them.

    `replace`: a spare that waits, else a fresh process; `shrink`: the workers that are left; `stop`: nobody.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._crew = bridge.crew
        self._moves = PlaceMoves(bridge)
        self._resizing = Resizing(bridge, self._moves)
        self._redealing = Redealing(bridge)
        self._autoscaler = Autoscaler(bridge.job.cluster)
        self._log = FailureLog(bridge.job.max_failures)
        self._raised: dict[Hand, Raised] = {}
        self._last_words: dict[Hand, Failure] = {}
        """Failures of workers that will be followed by others, once they have ended."""

    # How the run proceeds.

    def is_over(self) -> bool:
        """Whether all workers have ended, and none is to be replaced."""
        return not any(self._crew.living(Role.WORKER)) and not self._crew.vacancies

    def act(self) -> None:
        """Find hosts for free places, and bring the run to the size that is wanted."""
        for vacancy in list(self._crew.vacancies):
            if not self._bridge.has_failed:
                self._fill(vacancy)
        self._redealing.act()
        if self._resizing.act():
            self._autoscaler.begin_period()
        if self._is_settled and self._autoscaler.is_due(self._bridge.now):
            self._bridge.ask(MeasureLoad())

    @property
    def _is_settled(self) -> bool:
        """Whether no places change hands."""
        return bool(self._moves.hosts()) and self._resizing.is_idle and not self._crew.vacancies

    def hear_load(self, load: Load) -> None:
        """Another number of workers may be better, by what else the machine does."""
        if not self._is_settled:
            return
        decision = self._autoscaler.look(len(self._moves.hosts()), load, self._bridge.now)
        if decision is not None:
            self._resizing.want(decision.workers, decision.reason)

    def next_deadline(self) -> float | None:
        """The next look at the load."""
        return self._autoscaler.next_look()

    def _fill(self, vacancy: Vacancy) -> None:
        if self._bridge.job.on_failure == "shrink" and can_move(self._bridge.job) and self._moves.able_hosts():
            self._crew.vacancies.remove(vacancy)
            self._vacate(self._moves.share_out(vacancy.places, vacancy), vacancy.lost_at)
            return
        if (spare := self._crew.ready_spare()) is not None:
            self._crew.vacancies.remove(vacancy)
            self._moves.give(spare, vacancy.places, replace(vacancy, spare=spare.global_rank))
            self._keep_spares()
        elif not any(self._crew.living(Role.SPARE)):
            self._crew.vacancies.remove(vacancy)
            self._moves.give(self._moves.start_spare(), vacancy.places, vacancy)

    def _keep_spares(self) -> None:
        while len(list(self._crew.living(Role.SPARE))) < self._bridge.job.cluster.spares:
            self._moves.start_spare()

    def _vacate(self, places: list[int], lost_at: float) -> None:
        if places:
            self._crew.vacancies.append(Vacancy(tuple(sorted(places)), lost_at))

    # What members say.

    def hear(self, hand: Hand, word: Told) -> None:
        """A process has places, or gives some back, or says how far it is."""
        match word:
            case LineSaid() | Warned() if not hand.is_worker:
                self._bridge.emit(word)
            case Adopted(places=places, generation=generation) if hand.is_worker:
                self._redealing.confirm(hand, generation)
                self._confirm(hand, set(places))
            case Released(places=places) if hand.is_worker:
                self._vacate(self._resizing.take_released(hand, places), self._bridge.now)
            case Raised() if hand.is_worker:
                self._raised[hand] = word
            case StepsTaken(samples=samples) if hand.is_worker:
                self._autoscaler.note(samples, self._bridge.now)

    def _confirm(self, hand: Hand, places: set[int]) -> None:
        """It goes on with these places."""
        hand.unconfirmed = hand.unconfirmed - places
        for vacancy in [one for one in hand.succeeds if not hand.unconfirmed & set(one.places)]:
            hand.succeeds.remove(vacancy)
            told = Replaced(
                rank=vacancy.places[0],
                places=list(vacancy.places),
                seconds=self._bridge.now - vacancy.lost_at,
                hosts=sorted(list(one.places) for one in self._moves.hosts()),
                spare=vacancy.spare,
                by=vacancy.adopter,
            )
            self._bridge.emit(told, vacancy.places[0])

    def hear_failure(self, hand: Hand, failure: Failure) -> None:
        """A worker that raised while it trained may be followed by another; who raises before, always will."""
        raised = self._raised.get(hand)
        if raised is not None and not raised.final:
            failure = replace(failure, is_transient=True)
        if not hand.is_worker:
            self._bridge.emit(Warned(text=f"{hand.name} failed: {failure.message}"))
            self._resizing.give_up()
        elif raised is None or raised.final or not (self._replaces or self._redealing.can_follow(hand)):
            self._bridge.fail(failure)
        else:
            self._last_words[hand] = failure

    # What becomes of them.

    def notice_end(self, hand: Hand) -> None:
        """A process has ended: well, or to be replaced, or for good."""
        self._resizing.forget(hand)
        if not hand.is_worker:
            self._lose_spare(hand)
        elif hand.has_reported_failure and hand not in self._last_words:
            return
        elif self._has_done_its_work(hand):
            self._note_end_of_work(hand)
        elif hand.places:
            self._lose_worker(hand)

    def _has_done_its_work(self, hand: Hand) -> bool:
        if self._bridge.is_parting:
            return True
        # Who has told all may be needed by others, who are not there yet.
        return (hand.is_done and not self._redealing.can_follow(hand)) or self._ended_well(hand)

    def _ended_well(self, hand: Hand) -> bool:
        code = hand.exit_code
        is_script = self._bridge.job.purpose == Purpose.SCRIPT
        if self._bridge.is_stopping and (code in STOP_SIGNALS or code == 0 or (is_script and code > 0)):
            return True
        return code == 0 and (hand.is_done or is_script or not hand.places)

    def _note_end_of_work(self, hand: Hand) -> None:
        if not self._ended_well(hand):
            text = f"after its work was done: {explain_end(hand)}"
            self._bridge.emit(Warned(text=text), hand.global_rank)
        # What it was given at the last moment, it has not done.
        self._vacate(sorted(hand.unconfirmed), self._bridge.now)

    def _lose_worker(self, hand: Hand) -> None:
        failure = self._last_words.get(hand)
        if failure is None:
            failure = failure_of(hand, explain_end(hand))
        if (end := self._final_failure(hand, failure)) is not None:
            self._bridge.fail(end)
            return
        lost = Lost(rank=hand.global_rank, places=list(hand.places), reason=failure.message)
        self._bridge.emit(lost, hand.global_rank)
        if self._redealing.can_follow(hand):
            self._redealing.lose(hand)
        else:
            self._vacate(list(hand.places), self._bridge.now)

    @property
    def _could_replace(self) -> bool:
        return self._bridge.job.replaces and can_replace(self._bridge.job)

    @property
    def _replaces(self) -> bool:
        return self._could_replace and not self._bridge.has_failed

    def _final_failure(self, hand: Hand, failure: Failure) -> Failure | None:
        """What to end the run with; None where others can go on."""
        raised, code = self._raised.get(hand), hand.exit_code
        can_follow = self._redealing.can_follow(hand)
        if can_follow and hand.is_of_lost_host:
            return None if self._may_go_on() else replace(failure, is_transient=False)
        if self._could_replace and self._bridge.has_failed:
            # Its death alone would not have ended the run, so what failed before is the cause.
            return replace(failure, consequence=True)
        if not (self._could_replace or can_follow) or (code >= 0 and raised is None):
            advice = advice_after_loss(self._bridge.job) if code < 0 else ""
            why = f" {hand.end.lost_why}" if hand.end is not None and hand.end.lost_why else ""
            return replace(failure, message=f"{failure.message}{why}{advice}")
        enough = replace(failure, is_transient=False)
        if raised is not None and self._log.is_poisoned(raised):
            return replace(enough, message=verdict(raised))
        if self._log.is_too_much(self._bridge.now):
            return replace(enough, message=f"{failure.message} {self._log.complaint}")
        return None if self._may_go_on() else enough

    def _lose_spare(self, hand: Hand) -> None:
        if self._redealing.is_successor(hand):
            self._lose_successor(hand)
            return
        if hand.has_reported_failure:
            return
        reason = explain_end(hand)
        self._bridge.emit(Warned(text=reason))
        if self._may_go_on():
            self._keep_spares()
        elif self._crew.vacancies:
            self._bridge.fail(replace(failure_of(hand, reason), is_transient=False))
        else:
            self._resizing.give_up()

    def _lose_successor(self, hand: Hand) -> None:
        reason = explain_end(hand)
        if hand.has_reported_failure or not (hand.is_of_lost_host or self._may_go_on()):
            self._bridge.fail(replace(failure_of(hand, reason), is_transient=False))
            return
        self._bridge.emit(Warned(text=reason))
        self._redealing.lose_successor(hand)

    def _may_go_on(self) -> bool:
        """Whether to replace one more: not for ever where each successor dies without a step forward.

        As many as the user allows in a minute may die so, however long it takes: on a busy host a step can outlast
        several of them.
        """
        self._crew.fruitless_losses += 1
        job = self._bridge.job
        return self._crew.fruitless_losses <= max(job.max_failures, job.cluster.places + 2)

    def host_came(self, number: int, facts: HostFacts) -> None:
        """It gets places where every host has the whole state."""
        self._redealing.host_came(number, facts)

    def hosts_are(self, count: int, why: str) -> None:
        """Places are dealt when workers end, and when those that come are ready."""

    def objection_to_hosts(self, more: int) -> str | None:
        """Not where nobody can follow those that go, or those that come would have nothing to do."""
        return self._redealing.objection_to(more)

    # What the user asks for.

    def scale(self, request: ScaleRequest) -> None:
        """Other workers for the same places, as many as there are at most."""
        workers, most = len(self._moves.hosts()), self._bridge.job.cluster.places
        if request.is_question:
            answer = ScaleAnswered(text=f"{plural(workers, 'worker')}.", workers=workers, servers=0)
            self._bridge.answer(request, answer)
        elif self._bridge.is_stopping or any(hand.is_done for hand in self._crew.living(Role.WORKER)):
            self._bridge.answer(request, refusal(ENDING))
        elif (reason := self._objection(request, most)) is not None:
            self._bridge.answer(request, refusal(reason))
        else:
            assert request.workers is not None
            self._autoscaler.is_on = False  # from now on it is as the user says
            self._resizing.want(request.workers, "asked for")
            self._bridge.answer(request, ScaleAnswered(text=BEGUN, workers=request.workers))

    def _objection(self, request: ScaleRequest, most: int) -> str | None:
        job = self._bridge.job
        if request.servers is not None or request.workers is None:
            return f"This run's strategy is {job.strategy}, which has no servers; only its workers can be scaled."
        if not can_move(job):
            return (
                f"This run's strategy is {job.strategy}, whose workers stay the same from the first step to the "
                "last; runs of ps can be scaled, and those of data and average in shared memory."
            )
        if request.workers > most:
            return (
                f"This run's work was cut into {plural(most, 'place')} when it started, so {most} is the most "
                f"workers it can have; start it with --workers {min(most, request.workers)}:{request.workers} to "
                f"have up to {request.workers}."
            )
        return None
