"""Requests for more or fewer processes, on their way to the coordinator and back."""

from __future__ import annotations

from collections import deque
from typing import Any

from shoal.launch.messages import ScaleRequest
from shoal.launch.succession import Bridge
from shoal.observe.wording import plural

SCALED_ROLES = ("worker", "server")
BEGUN = "Scaling has begun; the run goes on meanwhile."
ENDING = "The run is ending; there is nothing left to scale."


class Waiting:
    """Requests that the coordinator has been told of and has not answered. It answers in order."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._requests: deque[ScaleRequest] = deque()

    def add(self, request: ScaleRequest) -> dict[str, Any]:
        """Keep a request; what to tell the coordinator."""
        self._requests.append(request)
        return {"kind": "scale", "workers": request.workers, "servers": request.servers}

    def answer(self, kind: str, values: dict[str, Any]) -> None:
        """Pass on what the coordinator says to the one who has waited longest."""
        if not self._requests:
            return  # A coordinator that was lost had been asked, and whoever asked was told so.
        request = self._requests.popleft()
        if kind == "scaled":
            self._bridge.answer(request, **values)
        else:
            self._bridge.refuse(request, values["text"])

    def refuse_all(self, text: str) -> None:
        """Nobody will answer them any more."""
        while self._requests:
            self._bridge.refuse(self._requests.popleft(), text)


def tell_numbers(request: ScaleRequest, bridge: Bridge) -> None:
    """Answer how many workers and servers there are, less those that have been asked to end."""
    living = bridge.crew.living
    counts = {role: sum(hand.dismissed_at is None for hand in living(role)) for role in SCALED_ROLES}
    text = " and ".join(plural(count, role) for role, count in counts.items())
    bridge.answer(request, f"{text}.", **{f"{role}s": count for role, count in counts.items()})
