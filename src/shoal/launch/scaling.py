"""Requests for more or fewer processes, on their way to the coordinator and back."""

from __future__ import annotations

from collections import deque

from shoal.comm.words import ScaleAnswered, ScaleWanted
from shoal.launch.messages import ScaleRequest
from shoal.launch.succession import Bridge
from shoal.observe.wording import plural
from shoal.spec.vocabulary import Role

SCALED_ROLES = (Role.WORKER, Role.SERVER)
BEGUN = "Scaling has begun; the run goes on meanwhile."
ENDING = "The run is ending; there is nothing left to scale."


class Waiting:
    """Requests that the coordinator has been told of and has not answered. It answers in order."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._requests: deque[ScaleRequest | None] = deque()
        """None: nobody waits for the answer."""

    def add(self, request: ScaleRequest) -> ScaleWanted:
        """Keep a request; what to tell the coordinator."""
        self._requests.append(request)
        return ScaleWanted(workers=request.workers, servers=request.servers)

    def add_own(self, workers: int, why: str) -> ScaleWanted:
        """A wish of this run's own."""
        self._requests.append(None)
        return ScaleWanted(workers=workers, why=why)

    def answer(self, answer: ScaleAnswered) -> None:
        """Pass on what the coordinator says to the one who has waited longest."""
        # A coordinator that was lost had been asked, too, and whoever asked was told so.
        if self._requests and (request := self._requests.popleft()) is not None:
            self._bridge.answer(request, answer)

    def refuse_all(self, text: str) -> None:
        """Nobody will answer them any more."""
        while self._requests:
            if (request := self._requests.popleft()) is not None:
                self._bridge.answer(request, refusal(text))


def refusal(text: str) -> ScaleAnswered:
    """What was asked for will not be done, for this reason."""
    return ScaleAnswered(text=text, is_refused=True)


def tell_numbers(request: ScaleRequest, bridge: Bridge) -> None:
    """Answer how many workers and servers there are, less those that have been asked to end."""
    living = bridge.crew.living
    counts = {role: sum(hand.dismissed_at is None for hand in living(role)) for role in SCALED_ROLES}
    text = " and ".join(plural(count, role) for role, count in counts.items())
    numbers = ScaleAnswered(text=f"{text}.", workers=counts[Role.WORKER], servers=counts[Role.SERVER])
    bridge.answer(request, numbers)
