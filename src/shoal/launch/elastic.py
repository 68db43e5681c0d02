"""How many workers a job should have: more where cores are idle and one more gains, fewer where they are not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shoal.launch.messages import Load
from shoal.spec import Cluster

GAIN = 1.05
"""A worker is kept where the run is at least so many times as fast with it."""
COOL_DOWN_S = 3.0
"""How long a number of workers is tried before it is judged."""
RETRY_S = 60.0
"""When a worker that gained nothing is tried again: the load may be another then."""
LOOK_EVERY_S = 1.0
ENOUGH_IDLE = 0.75
"""Cores."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What a decision is made by."""

    now: float
    workers: int
    least: int
    most: int
    speed: float | None
    """Samples per second with this number of workers; None until it has been tried long enough."""
    load: Load


@dataclass(frozen=True, kw_only=True)
class Experience:
    """What earlier decisions came to."""

    speed_before: float | None = None
    """Set after a worker was added: how fast it was without."""
    ceiling: int | None = None
    """More workers than this gained nothing."""
    ceiling_until: float = -math.inf


@dataclass(frozen=True, kw_only=True)
class ElasticWish:
    """Another number of workers, and why."""

    workers: int
    reason: str


def decide(outlook: Outlook, past: Experience) -> tuple[ElasticWish | None, Experience]:
    """Whether to have one worker more or fewer, and what to remember."""
    workers, speed, load = outlook.workers, outlook.speed, outlook.load
    if speed is None:
        return None, past
    if past.speed_before is not None:
        gain = speed / past.speed_before
        past = replace(past, speed_before=None)
        if gain < GAIN and workers > outlook.least:
            past = replace(past, ceiling=workers - 1, ceiling_until=outlook.now + RETRY_S)
            return ElasticWish(
                workers=workers - 1, reason=f"the last one changed the speed by {gain - 1:+.0%}"
            ), past
    if load.waiting > 1 and load.idle_cores < ENOUGH_IDLE / 3 and workers > outlook.least:
        return ElasticWish(workers=workers - 1, reason=f"{load.waiting:.1f} processes wait for a core"), past
    is_barred = past.ceiling is not None and workers >= past.ceiling and outlook.now < past.ceiling_until
    if load.idle_cores >= ENOUGH_IDLE and workers < outlook.most and not is_barred:
        past = replace(past, speed_before=speed)
        return ElasticWish(workers=workers + 1, reason=f"{load.idle_cores:.1f} cores are idle"), past
    return None, past


class SpeedMeter:
    """How fast a run is, since something has last changed."""

    def __init__(self) -> None:
        self._begun: tuple[float, int] | None = None
        self._latest: tuple[float, int] | None = None

    def note(self, samples: int, now: float) -> None:
        """So many samples have been trained on by now."""
        self._begun = self._begun or (now, samples)
        self._latest = now, samples

    def begin_period(self) -> None:
        """Something has changed: what was measured is over."""
        self._begun = self._latest = None

    def speed(self, over_s: float) -> float | None:
        """Samples per second; None where they were not counted for so long."""
        if self._begun is None or self._latest is None:
            return None
        (begin, before), (end, after) = self._begun, self._latest
        return (after - before) / (end - begin) if end - begin >= over_s else None


class Autoscaler(SpeedMeter):
    """Watches the speed of a run, and decides now and then."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster
        self._past = Experience()
        self._looked_at = 0.0
        self.is_on = cluster.is_elastic

    def next_look(self) -> float | None:
        """When to look again."""
        return self._looked_at + LOOK_EVERY_S if self.is_on else None

    def is_due(self, now: float) -> bool:
        """Whether to look again; not twice for one time."""
        if not self.is_on or now < self._looked_at + LOOK_EVERY_S:
            return False
        self._looked_at = now
        return True

    def look(self, workers: int, load: Load, now: float) -> ElasticWish | None:
        """Another number of workers, where one is due; not to be asked while places change hands."""
        assert self._cluster.min_workers is not None
        outlook = Outlook(
            now=now,
            workers=workers,
            least=self._cluster.min_workers,
            most=self._cluster.places,
            speed=self.speed(COOL_DOWN_S),
            load=load,
        )
        decision, self._past = decide(outlook, self._past)
        return decision
