"""Requests for more or fewer hosts while a run goes on. No I/O."""

from __future__ import annotations

from shoal.comm.words import ScaleAnswered
from shoal.launch.fleet import Fleet
from shoal.launch.messages import LetGo, ScaleRequest, WantHosts
from shoal.launch.scaling import BEGUN, ENDING, refusal
from shoal.launch.succession import Bridge, Succession
from shoal.observe.wording import plural


class HostScaling:
    """A part of the supervisor's machine. A host that leaves on request is lost as any other is: others do its
    work; one that comes is welcomed as one that was cut off."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    def heed(self, request: ScaleRequest, fleet: Fleet, succession: Succession) -> None:
        """Begin to do it, or say why not."""
        there = sorted(fleet.left)
        assert request.hosts is not None
        wanted = int(request.hosts) + (len(there) if request.hosts[0] in "+-" else 0)
        if (reason := self._objection(len(there), wanted, succession)) is not None:
            self._bridge.answer(request, refusal(reason))
        elif wanted > len(there):
            self._bridge.ask(WantHosts(request.number, wanted - len(there)))
        else:
            self._bridge.answer(request, ScaleAnswered(text=BEGUN, hosts=wanted))
            for number in there[wanted:]:
                self._bridge.ask(LetGo(number))

    def _objection(self, count: int, wanted: int, succession: Succession) -> str | None:
        if self._bridge.is_stopping or self._bridge.is_parting:
            return ENDING
        if not self._bridge.job.cluster.is_spread:
            return "This run is on one host, and stays there; start it with --on to have several."
        if wanted < 1:
            return f"This run has {plural(count, 'host')}, and needs at least one of them."
        return succession.objection_to_hosts(wanted - count)
