"""Places dealt anew over the workers of the hosts that there are, where each host has the whole state. No I/O."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from shoal.comm.words import AwaitDeal, Redeal, Stop
from shoal.launch.crew import Hand
from shoal.launch.sharing import adopted, spread
from shoal.launch.succession import Bridge
from shoal.launch.worlds import member_world
from shoal.observe.happenings import Replaced, Scaled
from shoal.observe.wording import plural
from shoal.spec.conduct import StateHolder
from shoal.spec.host_facts import HostFacts
from shoal.spec.vocabulary import Purpose, Role, State

_AT_WORK = (State.TRAINING, State.EVALUATING)


class Redealing:
    """A lost host costs its places alone: they are dealt to those that are left, who go on in the same step. A
    host that comes gets some of them back. A worker that dies alone is followed by another on its own host, for
    which all wait; what it has left half done in that host's memory is made good from another host.

    Neighbouring places stay on one host, in the order of hosts: sums go from host to host in the order of slots.

    Where each worker has a state of its own, places stay where they are, and those of whoever is lost, with its
    host or alone, go to those that are left: nobody could be given what is gone.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._crew = bridge.crew
        self._lost: list[int] = []
        """Places of those that were lost since all had last confirmed."""
        self._lost_at = 0.0
        self._is_due = False
        self._unconfirmed: set[Hand] = set()
        self._successors: set[Hand] = set()
        """Those that get ready to follow workers that died alone."""
        self._torn: set[int] = set()
        """Hosts that such a worker was on, until all of its workers go on there."""
        self._guests: dict[str, list[Hand]] = {}
        """By host: workers that get ready there."""
        self._came: tuple[str, int] | None = None
        """The host that the last deal was made for, and how many workers there were before."""

    def can_follow(self, hand: Hand) -> bool:
        """Whether others go on without this worker: all of them train by now, and on some host none has died."""
        if not self._is_possible or not self._bridge.job.replaces or self._bridge.has_failed:
            return False
        others = [one for one in self._members() if one is not hand]
        has_begun = hand.state != State.STARTING and all(one.state != State.STARTING for one in others)
        if self._has_own_states:
            return has_begun and bool(others)
        return has_begun and any(one.host not in {hand.host, *self._torn} for one in others)

    def is_successor(self, hand: Hand) -> bool:
        """Whether others wait for this process, or would if it lived."""
        return hand in self._successors

    @property
    def _is_possible(self) -> bool:
        return self._bridge.job.conduct.outlives_hosts and self._bridge.job.purpose == Purpose.TRAIN

    @property
    def _has_own_states(self) -> bool:
        """Whether what a worker has of its own goes with it."""
        return self._bridge.job.conduct.state is StateHolder.EACH_WORKER

    def lose(self, hand: Hand) -> None:
        """This worker's places are free."""
        self._lost_at = self._lost_at if self._lost else self._bridge.now
        self._lost += hand.places
        self._is_due = True
        if self._has_own_states:
            return
        if hand.is_of_lost_host:
            self._torn.discard(hand.host)
            return
        self._torn.add(hand.host)
        self._successors.add(self._start_successor(hand))
        for one in self._members():
            self._bridge.say(one, AwaitDeal())

    def lose_successor(self, successor: Hand) -> None:
        """It has ended, too: another is started, unless there is nowhere to."""
        self._successors.discard(successor)
        if successor.is_of_lost_host:
            self._torn.discard(successor.host)
        else:
            self._successors.add(self._start_successor(successor))

    def _start_successor(self, hand: Hand) -> Hand:
        """Start a process that stands where this one stood."""
        hosts = tuple(self._counts([*self._members(), hand]))
        world = replace(hand.world, role=Role.SPARE, places=(), generation=self._crew.generation, hosts=hosts)
        return self._bridge.start(world, is_seated=True)

    def host_came(self, number: int, facts: HostFacts) -> None:
        """Start workers on a host that has come, as many as there are places for, and it has cores."""
        job = self._bridge.job
        preparing = sum(len(guests) for guests in self._guests.values())
        free = job.cluster.places - len(self._members()) - preparing
        share = (
            job.cluster.workers_per_host if job.cluster.hosts else facts.cores // job.cluster.threads_per_worker
        )
        count = min(free, max(1, share))
        if not self._is_possible or self._has_own_states or count < 1:
            return
        ground = member_world(self._bridge.first_world, Role.SPARE, 0, generation=self._crew.generation)
        hosts = tuple(self._counts(self._members()))
        ground = replace(ground, host_number=number, host=facts.address, local_size=count, hosts=hosts)
        self._guests[facts.name] = [
            self._bridge.start(replace(ground, global_rank=rank, local_rank=rank), is_seated=True)
            for rank in range(count)
        ]

    def objection_to(self, more: int) -> str | None:
        """Why there cannot be so many more hosts, or fewer; None where there can."""
        job, workers = self._bridge.job, len(self._members())
        if not self._is_possible:
            return (
                f"This run's strategy is {job.strategy}, whose workers stay the same from the first step to the "
                "last; hosts come and go under ps and data."
            )
        if more > 0 and self._has_own_states:
            return (
                f"This run's strategy is {job.strategy}, under which each worker has a state of its own that "
                "nobody could give to a host that comes: hosts may leave, whose work others do, but none can come."
            )
        if more > 0 and workers >= job.cluster.places:
            return (
                f"This run's work was cut into {plural(job.cluster.places, 'place')} when it started, and as many "
                "workers do it: another host would have nothing to do; start it with more --workers."
            )
        return None

    def act(self) -> None:
        """Deal what is free: once, when all that were lost together are known; and to those that are ready."""
        if self._bridge.has_failed:
            return
        guests: list[Hand] = []
        for name, those in list(self._guests.items()):
            if not all(one.is_alive for one in those):
                del self._guests[name]
                for one in those:
                    self._bridge.say(one, Stop())
            elif self._may_grow and all(one.state == State.READY for one in those):
                del self._guests[name]
                self._came = name, len(self._members())
                guests += those
        if not all(successor.state == State.READY for successor in self._successors):
            return  # all wait for it
        if self._is_due or guests:
            self._is_due = False
            self._deal(guests)

    @property
    def _may_grow(self) -> bool:
        """Whether all are in the middle of it: at the end nobody is needed any more."""
        is_near_end = self._bridge.is_stopping or self._bridge.is_parting
        return not is_near_end and all(one.state in _AT_WORK and not one.is_done for one in self._members())

    def confirm(self, hand: Hand, generation: int) -> None:
        """A worker goes on where it was put."""
        if generation != self._crew.generation:
            return
        self._unconfirmed.discard(hand)
        self._torn &= {one.host for one in (*self._unconfirmed, *self._successors)}
        if self._unconfirmed:
            return
        members = self._members()
        dealt = [list(one.places) for one in members]
        if self._lost:
            places, self._lost = sorted(set(self._lost)), []
            seconds = self._bridge.now - self._lost_at
            self._bridge.emit(Replaced(rank=places[0], places=places, seconds=seconds, hosts=dealt), places[0])
        if self._came is not None:
            (name, before), self._came = self._came, None
            reason = f"host {name} has come"
            self._bridge.emit(Scaled(workers=len(members), before=before, hosts=dealt, reason=reason))

    def _members(self) -> list[Hand]:
        """The workers that there are, in the order of hosts, and of their own numbers there."""
        return sorted(self._crew.living(Role.WORKER), key=lambda one: (one.host, one.world.local_rank))

    def _counts(self, members: list[Hand]) -> list[int]:
        """How many of these each host has that the run has had: two at least, for it may have begun on one."""
        counts = Counter(one.host for one in members)
        return [counts[number] for number in range(max(1, *(one.host for one in self._crew.hands)) + 1)]

    def _dealt(self, members: list[Hand]) -> list[list[int]]:
        """Who does what."""
        places, had = self._bridge.job.cluster.places, [one.places for one in members]
        if self._has_own_states:
            free = sorted(set(range(places)).difference(*had))
            return [list(some) for some in adopted(had, free)]
        return [list(some) for some in spread(places, len(members))]

    def _deal(self, guests: list[Hand]) -> None:
        newcomers = (*guests, *self._successors)
        for hand in newcomers:
            hand.role = Role.WORKER
        self._successors.clear()
        members = self._members()
        deal = self._dealt(members)
        hosts = self._counts(members)
        self._crew.generation += 1
        self._unconfirmed = set(members)
        for number, hand in enumerate(members):
            hand.places, hand.global_rank = tuple(deal[number]), deal[number][0]
            word = Redeal(
                deal=deal,
                hosts=hosts,
                member=number,
                generation=self._crew.generation,
                torn=sorted(self._torn) or None,
            )
            self._bridge.say(hand, word)
            if self._bridge.is_stopping and hand in newcomers:
                self._bridge.say(hand, Stop())
