"""More or fewer hosts while a run goes on: as the user asks, or within the limits that the run has. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.comm.words import ScaleAnswered
from shoal.launch.elastic import GAIN, SpeedMeter
from shoal.launch.fleet import Fleet
from shoal.launch.messages import LetGo, ScaleRequest, WantHosts
from shoal.launch.scaling import BEGUN, ENDING, refusal
from shoal.launch.succession import Bridge, Succession
from shoal.observe.happenings import LineSaid, Warned
from shoal.observe.wording import plural
from shoal.spec.vocabulary import Role, State

LOOK_EVERY_S = 5.0
TRIED_FOR_S = 10.0
"""How long a number of hosts is measured before it is judged."""
COMES_WITHIN_S = 60.0
"""How long the workers of a host that has come may take to have a part in the work."""
RETRY_S = 600.0
"""When a host is asked for again, after one that gained nothing."""


@dataclass(frozen=True)
class HostTrial:
    """A host that has come because this run asked for one."""

    host: int
    speed_before: float
    workers_before: int
    since: float


class HostScaling:
    """A part of the supervisor's machine. A host that leaves on request is lost as any other is: others do its
    work; one that comes is welcomed as one that was cut off.

    With limits one host after the other is asked for, up to the most, and let go again where the run is not
    faster with it. Who comes by itself stays.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        cluster = bridge.job.cluster
        self._least, self._most = cluster.min_hosts or 1, cluster.max_hosts
        self._asks = self._most is not None and cluster.engine != "join"  # There a ticket lies open.
        self._meter = SpeedMeter()
        self._look_at = bridge.now + LOOK_EVERY_S
        self._workers = 0
        """For how many the speed is being measured."""
        self._asked_at_speed: float | None = None
        """Set when a host was asked for: how fast the run was without it."""
        self._trial: HostTrial | None = None
        self._barred_until = 0.0

    # What the user asks for.

    def heed(self, request: ScaleRequest, fleet: Fleet, succession: Succession) -> None:
        """Begin to do it, or say why not."""
        there = sorted(fleet.left)
        assert request.hosts is not None
        wanted = int(request.hosts) + (len(there) if request.hosts[0] in "+-" else 0)
        if (reason := self._objection(len(there), wanted, succession)) is not None:
            self._bridge.answer(request, refusal(reason))
            return
        self._asks = False  # from now on it is as the user says
        if wanted > len(there):
            self._bridge.ask(WantHosts(request.number, wanted - len(there)))
        else:
            self._bridge.answer(request, ScaleAnswered(text=BEGUN, hosts=wanted))
            for number in there[wanted:]:
                self._bridge.ask(LetGo(number))

    def _objection(self, count: int, wanted: int, succession: Succession) -> str | None:
        if self._bridge.is_stopping or self._bridge.is_parting:
            return ENDING
        cluster = self._bridge.job.cluster
        if not cluster.is_spread:
            return "This run is on one host, and stays there; start it with --on to have several."
        if self._most is not None and not self._least <= wanted <= self._most:
            asked = plural(wanted, "host")
            return f"This run was started with --hosts {cluster.hosts}, and {asked} are outside of that."
        if wanted < 1:
            return f"This run has {plural(count, 'host')}, and needs at least one of them."
        return succession.objection_to_hosts(wanted - count)

    # What the run asks for.

    def note(self, samples: int) -> None:
        """So many samples have been trained on by now."""
        self._meter.note(samples, self._bridge.now)

    def host_came(self, number: int) -> None:
        """One more host is there."""
        if self._asked_at_speed is not None:
            self._trial = HostTrial(number, self._asked_at_speed, self._workers, self._bridge.now)
            self._asked_at_speed = None

    def host_lost(self, number: int, fleet: Fleet) -> None:
        """One is there no more."""
        if self._trial is not None and self._trial.host == number:
            self._trial = None
        if self._most is not None and len(fleet.left) == self._least - 1 and fleet.left:
            text = (
                f"{plural(len(fleet.left), 'host')} of at least {self._least} are left; the run goes on with them"
            )
            self._bridge.emit(Warned(text=f"{text}, and takes in others that come"))
            self._barred_until = 0.0

    def next_deadline(self) -> float | None:
        """When to look again."""
        return self._look_at if self._asks else None

    def act(self, fleet: Fleet) -> None:
        """Judge what has come, and ask for one more host, where that is due."""
        if not self._asks or self._bridge.now < self._look_at:
            return
        self._look_at = self._bridge.now + LOOK_EVERY_S
        at_work = [one for one in self._bridge.crew.living(Role.WORKER) if one.state == State.TRAINING]
        if len(at_work) != self._workers:
            self._workers = len(at_work)
            self._meter.begin_period()
        speed = self._meter.speed(TRIED_FOR_S)
        if speed is None or self._bridge.is_stopping or self._bridge.is_parting:
            return
        if self._trial is not None:
            self._judge(self._trial, speed, fleet)
        elif self._most is not None and len(fleet.left) < self._most and self._bridge.now >= self._barred_until:
            self._asked_at_speed = speed
            self._bridge.ask(WantHosts(None, 1))

    def _judge(self, trial: HostTrial, speed: float, fleet: Fleet) -> None:
        takes_part = self._workers > trial.workers_before
        if not takes_part and self._bridge.now < trial.since + COMES_WITHIN_S:
            return
        self._trial = None
        gain = speed / trial.speed_before
        if (takes_part and gain >= GAIN) or len(fleet.left) <= self._least:
            return
        self._barred_until = self._bridge.now + RETRY_S
        name = fleet.left[trial.host].name
        self._bridge.emit(LineSaid(text=f"host {name} is let go: it changed the speed by {gain - 1:+.0%}"))
        self._bridge.ask(LetGo(trial.host))
