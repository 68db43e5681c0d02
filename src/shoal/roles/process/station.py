"""What a Trainer in a script of `shoal run` can know of its run, besides what the environment says."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from shoal.comm.channel import Channel
from shoal.comm.words import Announced, MetAll
from shoal.errors import LaunchError, SpecError
from shoal.roles.process.reporter import Reporter
from shoal.spec import Job, World

_stations: list[Station] = []
"""That of this process, once its script runs: a script is handed nothing, so its Trainer has to look here."""


class ScriptMeetings:
    """A script's part in meetings at the supervisor: it waits in one thread, and another one hears for it."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._news = threading.Condition()
        self._met: dict[str, list[str]] = {}

    def hear(self, word: MetAll) -> None:
        """All have come to a meeting."""
        with self._news:
            self._met[word.name] = word.texts
            self._news.notify_all()

    def meet(self, name: str, text: str) -> dict[int, str]:
        """Leave a text, and wait until all have. Where somebody has died, the supervisor ends this process."""
        self._reporter.send(Announced(name=name, text=text))
        with self._news:
            self._news.wait_for(lambda: name in self._met)
            return dict(enumerate(self._met.pop(name)))


@dataclass(eq=False, kw_only=True)
class Station:
    """Where a script's process stands in its run. What processes know each other by is in no variable that the
    script's own children would inherit."""

    job: Job
    """Of the run, as the supervisor has it."""
    world: World
    channel: Channel
    reporter: Reporter
    meetings: ScriptMeetings
    """With the workers of other hosts."""
    has_begun: bool = False
    """Whether this process has come to a `fit` that servers take part in."""

    @property
    def has_servers(self) -> bool:
        """Whether coordinator and servers run this script, too."""
        return self.job.conduct.servers > 0

    @property
    def meeting_world(self) -> World:
        """Where processes of a run with servers meet: at sockets of this host; MASTER_PORT is the script's own."""
        return replace(self.world, coordinator="")

    def meet(self, text: str) -> dict[int, str]:
        """Leave a text for all workers of the run, on whichever host, and wait for theirs, by rank."""
        return self.meetings.meet(f"script@{self.world.generation}", text)

    def begin(self) -> None:
        """This process is about to train, or to serve those who do."""
        if self.has_begun:
            raise SpecError(
                f"Trainer: the servers of strategy={self.job.strategy} serve one fit(), and end with the run; "
                "start another run for the next one."
            )
        self.has_begun = True

    def check_begun(self) -> None:
        """The script is over: refuse one that never came to its servers."""
        if self.has_servers and not self.has_begun:
            raise LaunchError(
                f"The script has ended in {self.world.role} {self.world.global_rank} without Trainer.fit(), but "
                f"servers were started for it; come to fit() in every process, or leave out --strategy "
                f"{self.job.strategy}."
            )


def take_station(station: Station) -> None:
    """From now on this process stands there."""
    _stations.append(station)


def world_at(station: Station | None) -> World:
    """Where a Trainer's process stands, as far as whoever started it has said."""
    if station is not None and station.has_servers:
        return station.meeting_world
    return World.from_environment()


def current_station() -> Station | None:
    """Where this process stands in a run of `shoal run`; None where another has started it."""
    return _stations[-1] if _stations else None
