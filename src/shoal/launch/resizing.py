"""More or fewer workers for a synchronous run that goes on: places change hands, and nothing else does."""

from __future__ import annotations

from collections import defaultdict

from shoal.launch.crew import Hand
from shoal.launch.moves import PlaceMoves
from shoal.launch.sharing import gifts, leavers
from shoal.launch.succession import Bridge
from shoal.observe.happenings import Scaled
from shoal.spec.vocabulary import Role, State


class Resizing:
    """Brings a run to the number of workers that is wanted.

    It looks at what there is and does what is missing, so that a death meanwhile needs no special care. Places are
    handed on one by one as they are released: whoever has to release another may wait for the first already.
    """

    def __init__(self, bridge: Bridge, moves: PlaceMoves) -> None:
        self._bridge = bridge
        self._crew = bridge.crew
        self._moves = moves
        self._wanted: int | None = None
        self._before = 0
        self._reason = ""
        self._newcomers: list[Hand] = []
        self._releasing: dict[int, Hand] = {}
        """By place: who has been asked for it."""
        self._takers: dict[int, Hand] = {}
        """By place: the newcomer that it is for."""

    @property
    def is_idle(self) -> bool:
        """Whether the number of workers is the one that is wanted."""
        return self._wanted is None

    def want(self, workers: int, reason: str) -> None:
        """So many workers shall train."""
        self._wanted, self._reason = workers, reason
        self._before = len(self._moves.hosts())

    def give_up(self) -> None:
        """Leave it at what there is."""
        self._wanted = None

    def act(self) -> bool:
        """Do the next thing; True when all is done."""
        living = list(self._crew.living(Role.WORKER))
        if self._wanted is None:
            return False
        if self._bridge.is_stopping or self._bridge.has_failed or any(hand.is_done for hand in living):
            self._wanted = None
            return False
        if self._releasing or self._crew.vacancies or any(hand.unconfirmed for hand in living):
            return False
        hosts = self._moves.able_hosts()
        if len(hosts) < len(self._moves.hosts()):
            return False
        if len(hosts) > self._wanted:
            self._shrink(hosts, self._wanted)
        elif len(hosts) < self._wanted:
            self._grow(hosts, self._wanted - len(hosts))
        else:
            self._finish(hosts)
            return True
        return False

    def take_released(self, hand: Hand, places: list[int]) -> list[int]:
        """A worker has released places: hand them on. Returns those that nobody could be found for."""
        self._moves.take_back(hand, places)
        orphans = []
        by_taker: dict[Hand, list[int]] = defaultdict(list)
        for place in places:
            self._releasing.pop(place, None)
            taker = self._takers.pop(place, None)
            if taker is not None and taker.is_alive:
                by_taker[taker].append(place)
            else:
                orphans.append(place)
        for taker, given in by_taker.items():
            self._moves.give(taker, given)
        return self._moves.share_out(orphans)

    def forget(self, hand: Hand) -> None:
        """A process has ended."""
        self._releasing = {place: one for place, one in self._releasing.items() if one is not hand}
        # Whom a place was for when its host died may be leaving itself when another host releases it.
        self._takers = {place: one for place, one in self._takers.items() if place in self._releasing}
        if hand in self._newcomers:
            self._newcomers.remove(hand)

    def _shrink(self, hosts: list[Hand], wanted: int) -> None:
        for hand in leavers({one: one.places for one in hosts}, wanted):
            self._moves.ask_back(hand, hand.places)
            hand.dismissed_at = self._bridge.now
            self._releasing |= dict.fromkeys(hand.places, hand)

    def _grow(self, hosts: list[Hand], missing: int) -> None:
        self._newcomers = [one for one in self._newcomers if not one.is_worker]
        while len(self._newcomers) < missing:
            self._newcomers.append(self._moves.start_spare())
        if any(one.state != State.READY for one in self._newcomers):
            return
        asked: dict[Hand, list[int]] = defaultdict(list)
        moves = gifts({one: one.places for one in hosts}, self._newcomers)
        for place, (giver, taker) in moves.items():
            self._takers[place] = taker
            asked[giver].append(place)
        for giver, places in asked.items():
            self._moves.ask_back(giver, places)
            self._releasing |= dict.fromkeys(places, giver)

    def _finish(self, hosts: list[Hand]) -> None:
        self._wanted = None
        self._newcomers = []
        places = sorted(list(one.places) for one in hosts)
        scaled = Scaled(workers=len(hosts), before=self._before, hosts=places, reason=self._reason)
        self._bridge.emit(scaled)
