"""A run with servers: its coordinator decides who is replaced, and this carries it out.

The coordinator is told who lives once it can hear, from then on of every process that ends, and orders processes
to be started or ended. Its own death is the one that nobody else can deal with: a successor is started at the
same address.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from typing import Any

from shoal.comm.words import (
    Coordinate,
    CoordinatorMoved,
    MemberLeft,
    MemberLost,
    MembersLiving,
    Ordered,
    OrderedAction,
    ScaleAnswered,
    Stop,
)
from shoal.launch.crew import Hand
from shoal.launch.dismissals import Dismissals
from shoal.launch.elastic import Autoscaler
from shoal.launch.failure_log import FailureLog, verdict
from shoal.launch.membership import STOP_SIGNALS
from shoal.launch.messages import Load, MeasureLoad, ScaleRequest
from shoal.launch.scaling import ENDING, SCALED_ROLES, Waiting, refusal, tell_numbers
from shoal.launch.succession import Bridge
from shoal.launch.verdict import Failure, explain_end, failure_of
from shoal.launch.worlds import member_world, workers_on
from shoal.observe.happenings import (
    Audited,
    Decided,
    Done,
    LineSaid,
    Lost,
    Raised,
    Replaced,
    StateEntered,
    StepsTaken,
    Warned,
)
from shoal.spec.host_facts import HostFacts
from shoal.spec.told import Told
from shoal.spec.vocabulary import Purpose, Role, State

AUDIT_TIMEOUT_S = 40.0
"""How long the coordinator may take for its last words. One that hangs is found and followed before that."""
_CLOSE_S = 2.0


class Phase(Enum):
    """How far a run with servers has come."""

    WORKING = "working"
    """There are workers."""
    SETTLING = "settling"
    """All workers have ended; the coordinator has still to say what it counted, or to order another one."""
    CLOSING = "closing"
    """Servers and coordinator have been asked to end."""


class Service:
    """The succession of a job with servers."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._crew = bridge.crew
        self._phase = Phase.WORKING
        self._phase_ends_at: float | None = None
        self._lost_at: dict[tuple[Role, int], float] = {}
        """By seat: when it was lost; nobody has been started for it since."""
        self._postponed: set[tuple[Role, int]] = set()
        """Seats to be filled once those dismissed from them have ended: both would use the same memory."""
        self._lost_worker: Failure | None = None
        """What to tell if nobody finishes a lost worker's work."""
        self._dismissals = Dismissals(bridge)
        self._waiting = Waiting(bridge)
        self._log = FailureLog(bridge.job.max_failures)
        self._raised: dict[Hand, Raised] = {}
        """What workers said about the errors that ended them."""
        self._autoscaler = Autoscaler(bridge.job.cluster)
        self._share: tuple[int, str] | None = None
        """How many workers the hosts that there are have together, and why, since some came or went."""
        self._measured = 0
        """For how many workers the speed is being measured."""

    # How the run proceeds.

    def is_over(self) -> bool:
        """Whether servers and coordinator have ended after the workers, or had their time to."""
        if self._phase is not Phase.CLOSING or self._phase_ends_at is None:
            return False
        return not any(self._crew.living()) or self._bridge.now >= self._phase_ends_at

    def act(self) -> None:
        """Go from phase to phase; end those that were asked to and did not."""
        now = self._bridge.now
        self._dismissals.act()
        if self._phase is Phase.CLOSING:
            return
        if any(self._crew.living(Role.WORKER)):
            self._enter(Phase.WORKING, None)
            self._follow_load()
            return
        if self._phase is Phase.WORKING or self._coordinator.follows_loss_at is not None:
            # The time of one that follows begins when it speaks.
            self._enter(Phase.SETTLING, now + AUDIT_TIMEOUT_S)
        if self._is_settled() and self._missing_results() is None:
            self._close(now)
        elif self._phase_ends_at is not None and now >= self._phase_ends_at:
            self._give_up()

    def next_deadline(self) -> float | None:
        """The end of this phase, or of somebody's patience."""
        deadlines = [self._dismissals.next_deadline(), self._phase_ends_at, self._autoscaler.next_look()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _enter(self, phase: Phase, ends_at: float | None) -> None:
        self._phase, self._phase_ends_at = phase, ends_at

    def _is_settled(self) -> bool:
        """Whether nothing more is expected of the coordinator."""
        if self._bridge.is_stopping and not any(role == Role.WORKER for role, _ in self._lost_at):
            return True  # It counts whole runs only.
        return self._coordinator.is_done or (self._bridge.is_stopping and not self._coordinator.is_alive)

    def _missing_results(self) -> Failure | None:
        """Why there are no results: a worker was lost, and the first one never came to its end."""
        has_results = any(hand.is_done and hand.global_rank == 0 for hand in self._crew.hands if hand.is_worker)
        return None if has_results or self._bridge.is_stopping else self._lost_worker

    def _give_up(self) -> None:
        """The coordinator says nothing more."""
        if (failure := self._missing_results()) is not None:
            self._bridge.fail(failure)
            return
        text = (
            f"The coordinator did not say what it counted within {AUDIT_TIMEOUT_S:.0f} s of the workers' end, so "
            "nobody knows whether each part of the data was applied once; look at its output, and train again."
        )
        self._bridge.fail(Failure(message=text))

    def _close(self, now: float) -> None:
        self._enter(Phase.CLOSING, now + _CLOSE_S)
        self._waiting.refuse_all(ENDING)
        for hand in self._crew.living():
            self._bridge.say(hand, Stop())

    # What members say.

    def hear(self, hand: Hand, word: Told) -> None:
        """A successor speaks for the first time; the coordinator orders, decides, counts, answers."""
        match word:
            case StateEntered(state=state) if state != State.STARTING and hand.follows_loss_at is not None:
                seconds, hand.follows_loss_at = self._bridge.now - hand.follows_loss_at, None
                self._bridge.emit(Replaced(seconds=seconds, **_identity(hand)), hand.rank)
            case Raised():
                self._raised[hand] = word
            case StepsTaken(samples=samples) if hand.is_worker:
                self._autoscaler.note(samples, self._bridge.now)
            case LineSaid() | Warned() if not hand.is_worker:
                self._bridge.emit(replace(word, text=f"{hand.name}: {word.text}"))
        if hand.role == Role.COORDINATOR:
            self._hear_coordinator(hand, word)

    def _hear_coordinator(self, hand: Hand, word: Told) -> None:
        match word:
            case StateEntered(state=State.READY):
                self._brief(hand)
            case Ordered():
                self._obey(word)
            case Decided():
                self._bridge.emit(word)
            case Done(results=counted):
                self._bridge.emit(Audited.from_plain(counted))
                self._bridge.results.values["audit"] = counted
                hand.is_done = True
            case ScaleAnswered():
                self._waiting.answer(word)

    def hear_failure(self, hand: Hand, failure: Failure) -> None:
        """Who lost a peer, or raised at what another may manage, is itself lost; other failures are the run's."""
        if self._phase is Phase.CLOSING:
            self._bridge.emit(Warned(text=f"at its end, {hand.name} failed: {failure.message}"))
        elif failure.consequence:
            hand.complaint = failure.message
        elif (raised := self._raised.get(hand)) is None or raised.final:
            # A coordinator that gives up after a server was lost might not have to in another attempt.
            gives_up = hand.role == Role.COORDINATOR and any(role == Role.SERVER for role, _ in self._lost_at)
            self._bridge.fail(replace(failure, is_transient=gives_up))
        elif self._log.is_poisoned(raised):
            self._bridge.fail(replace(failure, message=verdict(raised)))
        elif not self._bridge.job.replaces:
            self._bridge.fail(replace(failure, is_transient=True))
        else:
            hand.complaint = failure.message

    def _obey(self, order: Ordered) -> None:
        if self._phase is Phase.CLOSING or self._bridge.has_failed:
            return
        if order.action == OrderedAction.START:
            self._start(order.role, order.rank)
        else:
            self._dismiss(order.node)

    def _start(self, role: Role, rank: int) -> None:
        if self._bridge.is_stopping and (role, rank) not in self._lost_at:
            return  # Nobody died there: whom the coordinator misses has stopped on request.
        for one in self._crew.living(role):
            if one.global_rank == rank:
                # It is on its way, and its end would be told; or dismissed, and has the seat until its end.
                if one.dismissed_at is not None:
                    self._postponed.add((role, rank))
                return
        node = 1 + max(hand.node for hand in self._crew.hands)
        before = sum((one.role, one.global_rank) == (role, rank) for one in self._crew.hands)
        world = member_world(self._bridge.first_world, role, rank, node=node, generation=before)
        hand = self._bridge.start(world)
        hand.follows_loss_at = self._lost_at.pop((role, rank), None)
        if hand.is_worker and self._bridge.is_stopping:
            self._bridge.say(hand, Stop())

    def _dismiss(self, node: int | None) -> None:
        # It may have died a moment ago; then the coordinator is about to hear of it.
        for hand in self._members():
            if hand.node == node:
                self._dismissals.dismiss(hand)

    # What becomes of them.

    def notice_end(self, hand: Hand) -> None:
        """A process has ended: well, or as a loss that the coordinator must know of."""
        if self._bridge.has_failed:
            return
        if (seat := (hand.role, hand.global_rank)) in self._postponed:
            self._postponed.remove(seat)
            self._start(*seat)
        if self._ended_well(hand):
            if hand.dismissed_at is not None or not self._bridge.is_stopping:
                self._tell_end(hand)
            return
        reason = hand.complaint or explain_end(hand)
        if hand.is_done and not self._is_needed(hand):
            text = f"{hand.name}, after its work was done: {reason}"
            self._bridge.emit(Warned(text=text))
            self._tell_end(hand)
            return
        failure = failure_of(hand, reason)
        if not self._bridge.job.replaces or self._is_beyond_training(hand):
            self._bridge.fail(failure)
            return
        if self._log.is_too_much(self._bridge.now):
            self._bridge.fail(replace(failure, message=f"{reason} {self._log.complaint}", is_transient=False))
            return
        self._lost_at[hand.role, hand.global_rank] = self._bridge.now
        self._bridge.emit(Lost(reason=reason, **_identity(hand)), hand.rank)
        if hand.role == Role.COORDINATOR:
            self._succeed_coordinator()
            return
        if hand.role == Role.STANDBY:
            self._lost_at.pop((Role.STANDBY, hand.global_rank))
            self._start_standby()
            return
        if hand.is_worker:
            self._lost_worker = failure
        self._tell_end(hand)

    def _tell_end(self, hand: Hand) -> None:
        """Tell the coordinator, if it can hear; one that cannot yet is told who lives when it can."""
        if hand.role in SCALED_ROLES and self._coordinator.state == State.READY:
            end: type[MemberLeft | MemberLost] = MemberLeft if hand.is_worker and hand.is_done else MemberLost
            self._bridge.say(self._coordinator, end(**_identity(hand)))

    def _brief(self, coordinator: Hand) -> None:
        """Tell a coordinator who lives, and which workers have done their work."""
        left = [one for one in self._crew.hands if one.is_worker and one.is_done and not one.is_alive]
        members, gone = ([_identity(one) for one in hands] for hands in (self._members(), left))
        self._bridge.say(coordinator, MembersLiving(members=members, left=gone))
        if self._share is not None:
            self._bridge.say(coordinator, self._waiting.add_own(*self._share))

    def _is_needed(self, hand: Hand) -> bool:
        """Whether there is work for it though it is done: a coordinator has some until the workers have."""
        is_worked_on = any(self._crew.living(Role.WORKER)) or self._missing_results() is not None
        return hand.role == Role.COORDINATOR and is_worked_on

    def _ended_well(self, hand: Hand) -> bool:
        code = hand.exit_code
        if self._phase is Phase.CLOSING or hand.is_overdue:
            return True
        was_asked = self._bridge.is_stopping or hand.dismissed_at is not None
        if was_asked and self._runs_script and hand.is_worker and code > 0:
            return True  # A script is interrupted, and says so with a status of its own.
        if self._bridge.is_stopping and (code in STOP_SIGNALS or (code == 0 and hand.is_worker)):
            return True
        has_leave = hand.is_done or hand.dismissed_at is not None
        return code == 0 and (has_leave or (hand.role == Role.SERVER and self._work_is_done()))

    def _is_beyond_training(self, hand: Hand) -> bool:
        """Whether a script has ended itself, or was past `fit`: coordinator and servers can make good for what is
        trained, and for nothing else that a script does."""
        has_ended_itself = hand.exit_code >= 0 and not hand.complaint
        is_past_fit = hand.is_worker and hand.state == State.SCRIPT
        return self._runs_script and (has_ended_itself or is_past_fit)

    def _succeed_coordinator(self) -> None:
        self._waiting.refuse_all("The coordinator was lost before it answered; ask again.")
        before = self._bridge.first_world.coordinator
        world = member_world(self._bridge.first_world, Role.COORDINATOR, 0)
        ready = [one for one in self._crew.living(Role.STANDBY) if one.state == State.READY]
        if ready:
            hand = ready[0]
            self._bridge.say(hand, Coordinate(coordinator=self._bridge.promote(hand, world).coordinator))
            self._start_standby()
        else:
            hand = self._bridge.start(world)
        hand.follows_loss_at = self._lost_at.pop((Role.COORDINATOR, 0))
        if (world := self._bridge.first_world).coordinator != before:
            for member in self._members():
                self._bridge.say(member, CoordinatorMoved(address=world.coordinator_address))

    def _start_standby(self) -> None:
        world = member_world(self._bridge.first_world, Role.STANDBY, 0)
        self._bridge.start(world)

    def host_came(self, number: int, facts: HostFacts) -> None:
        """Who is started next may go there."""

    def hosts_are(self, count: int, why: str) -> None:
        """Where hosts come and go, so do workers: each has its share."""
        job = self._bridge.job
        if job.cluster.hosts and job.conduct.takes_hosts and count:
            self._share = workers_on(job, count), why
            if self._coordinator.state == State.READY:
                self._bridge.say(self._coordinator, self._waiting.add_own(*self._share))

    def objection_to_hosts(self, more: int) -> str | None:
        """Backups and successors follow those that go."""
        return None

    # What the user asks for.

    def scale(self, request: ScaleRequest) -> None:
        """The coordinator decides about numbers; how many there are is known here."""
        if request.is_question:
            tell_numbers(request, self._bridge)
        elif self._phase is not Phase.WORKING or self._bridge.is_stopping:
            self._bridge.answer(request, refusal(ENDING))
        else:
            # From now on it is as the user says.
            self._autoscaler.is_on = self._autoscaler.is_on and request.workers is None
            self._bridge.say(self._coordinator, self._waiting.add(request))

    def _follow_load(self) -> None:
        """Look at the load now and then, while as many train as are wanted."""
        if (steady := self._steady_workers()) is None or not self._autoscaler.is_on:
            return
        if steady != self._measured:
            self._measured = steady
            self._autoscaler.begin_period()
        if self._autoscaler.is_due(self._bridge.now):
            self._bridge.ask(MeasureLoad())

    def _steady_workers(self) -> int | None:
        """How many train; None while some come or go, or are done."""
        workers = list(self._crew.living(Role.WORKER))
        moves = any(one.state == State.STARTING or one.dismissed_at is not None or one.is_done for one in workers)
        is_heard = self._coordinator.is_alive and self._coordinator.state == State.READY
        return None if moves or not is_heard or self._bridge.is_stopping else len(workers)

    def hear_load(self, load: Load) -> None:
        """Another number of workers may be better, by what else the machine does; the coordinator decides."""
        if (workers := self._steady_workers()) is None or workers != self._measured:
            return
        wish = self._autoscaler.look(workers, load, self._bridge.now)
        if wish is not None:
            self._autoscaler.begin_period()
            self._bridge.say(self._coordinator, self._waiting.add_own(wish.workers, wish.reason))

    # Who is who.

    @property
    def _coordinator(self) -> Hand:
        """The one that lives, or the last: a standby may have been started before who it follows."""
        those = [hand for hand in reversed(self._crew.hands) if hand.role == Role.COORDINATOR]
        return next((hand for hand in those if hand.is_alive), those[0])

    def _members(self) -> Iterator[Hand]:
        return self._crew.living(*SCALED_ROLES)

    @property
    def _runs_script(self) -> bool:
        return self._bridge.job.purpose == Purpose.SCRIPT

    def _work_is_done(self) -> bool:
        return all(hand.is_done for hand in self._crew.living(Role.WORKER))


def _identity(hand: Hand) -> dict[str, Any]:
    return {"node": hand.node, "role": hand.role, "rank": hand.global_rank}
