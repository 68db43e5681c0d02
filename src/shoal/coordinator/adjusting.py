"""The coordinator's adjustments over time: it watches the reports, and applies the policy with patience."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.coordinator import policy
from shoal.coordinator.plan import JobPlan
from shoal.coordinator.reports import Reports

OBSERVE_S = 0.25
BAD_OBSERVATIONS = 6
"""A loss must be bad so many times in a row before anything is rolled back."""
REST_OBSERVATIONS = 20
"""After a rollback the loss is not looked at so many times: what is reported was computed before."""
SLOW_OBSERVATIONS = 40
TREND_OBSERVATIONS = 40
"""How far back the loss is looked at to see whether it falls or rises, and how often the bound may change."""


@dataclass(frozen=True, kw_only=True)
class Adjustment:
    """What the policy wants done, and why."""

    what: str
    why: str
    numbers: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """For the next view."""
    controls: tuple[tuple[str, dict[str, Any]], ...] = ()
    """For every shard, in this order."""
    evict: int | None = None
    """A node to replace."""
    stop: str | None = None
    """Why the run must end."""


class Adjuster:
    """Smoothed measurements, and what was decided from them so far."""

    def __init__(self, plan: JobPlan, saved: Mapping[str, Any], now: float) -> None:
        self._plan = plan
        self._rollbacks: int = saved.get("rollbacks", 0)
        self._halvings: float = saved.get("halvings", 1.0)
        """The factor of the learning rate that rollbacks have left."""
        self._rate: float = saved.get("rate", 1.0)
        """The factor of the learning rate by staleness."""
        self._bound: int | None = saved.get("bound", plan.bound)
        self._shares: dict[int, float] = saved.get("shares", {})
        self._first: float | None = saved.get("first")
        self._best: float | None = saved.get("best")
        self._loss: float | None = None
        self._began_with = math.inf
        """The smallest of the workers' first losses: reports come later, and it may have run away by then."""
        self._speeds: dict[int, float] = {}
        self._history: list[float] = []
        self._bad = 0
        self._rest = 0
        self._slow: Counter[int] = Counter()
        self._observe_at = now
        self._mark_at = now

    def plain(self) -> dict[str, Any]:
        """What a successor must know."""
        return {
            "rollbacks": self._rollbacks,
            "halvings": self._halvings,
            "rate": self._rate,
            "bound": self._bound,
            "shares": self._shares,
            "first": self._first,
            "best": self._best,
        }

    def decide(self, reports: Reports, workers: Mapping[int, int], now: float) -> list[Adjustment]:
        """Take a look if it is time for one, and say what to do."""
        if now < self._observe_at or not workers:
            return []
        self._observe_at = now + OBSERVE_S
        self._observe(reports, workers)
        adjust = self._plan.adjust
        decisions: list[Adjustment] = []
        if "divergence" in adjust:
            decisions += self._watch_loss(now)
        if not self._bad:
            decisions += self._share() if "shares" in adjust else ()
            decisions += self._move_bound(reports, workers) if "bound" in adjust else ()
            decisions += self._scale_rate(reports, workers) if "rate" in adjust else ()
        decisions += self._evict(workers) if "eviction" in adjust and self._plan.leased else ()
        return decisions

    def _observe(self, reports: Reports, workers: Mapping[int, int]) -> None:
        self._rest -= 1
        begun = [loss for node in workers.values() if (loss := reports.number(node, "first_loss")) is not None]
        self._began_with = min([self._began_with, *(loss for loss in begun if math.isfinite(loss))])
        losses = [loss for node in workers.values() if (loss := reports.number(node, "loss")) is not None]
        if losses and self._rest < 0:
            mean = sum(losses) / len(losses)
            # A loss that is no number must show at once, and must not stay in the running value for ever.
            usable = self._loss if self._loss is not None and math.isfinite(self._loss) else None
            self._loss = policy.smoothed(usable, mean) if math.isfinite(mean) else mean
        speeds = {rank: reports.number(node, "samples_per_s") for rank, node in workers.items()}
        self._speeds = {
            rank: policy.smoothed(self._speeds.get(rank), speed)
            for rank, speed in speeds.items()
            if speed is not None and math.isfinite(speed)
        }

    def _watch_loss(self, now: float) -> Iterator[Adjustment]:
        """Mark while all is well; roll back when the loss stays bad; stop when that has not helped."""
        if self._loss is None:
            return
        if self._first is None and math.isfinite(self._loss):
            self._first = self._best = min(self._loss, self._began_with)
        first, best = self._first or 0.0, self._best or 0.0
        if not policy.is_diverging(self._loss, first=first, best=best):
            self._bad = 0
            self._best = min(best, self._loss)
            if self._plan.mark_every_s and now >= self._mark_at:
                self._mark_at = now + self._plan.mark_every_s
                yield Adjustment(what="mark", why="the loss is healthy", controls=(("mark", {}),))
            return
        self._bad += 1
        if self._bad >= BAD_OBSERVATIONS:
            yield self._roll_back()

    def _roll_back(self) -> Adjustment:
        found, self._loss, self._bad = self._loss, None, 0
        why = f"the loss is {found:.4g} and was {self._best or 0.0:.4g} at best"
        if self._rollbacks >= self._plan.max_rollbacks:
            tried = f", and {self._rollbacks} rollbacks did not help" if self._rollbacks else ""
            sentence = f"The run diverges: {why}{tried}; lower the learning rate, or set clip_norm."
            return Adjustment(what="stop", why=why, stop=sentence)
        self._rollbacks += 1
        self._rest = REST_OBSERVATIONS
        self._halvings /= 2
        return Adjustment(
            what="rollback",
            why=why,
            numbers={"rollbacks": self._rollbacks, "factor": self._factor},
            controls=(("rollback", {}), ("scale", {"factor": self._factor})),
        )

    @property
    def _factor(self) -> float:
        return self._halvings * self._rate

    def _share(self) -> Iterator[Adjustment]:
        shares = policy.shares_by_speed(self._speeds, self._shares)
        if shares is not None:
            self._shares = shares
            numbers = {"speeds": dict(self._speeds), "shares": shares}
            yield Adjustment(what="shares", why="speeds differ", numbers=numbers, settings={"shares": shares})

    def _move_bound(self, reports: Reports, workers: Mapping[int, int]) -> Iterator[Adjustment]:
        if self._loss is None or self._bound is None or self._plan.bound is None:
            return
        self._history.append(self._loss)
        if len(self._history) <= TREND_OBSERVATIONS:
            return
        before, self._history = self._history[0], []
        waits = [waited for node in workers.values() if (waited := reports.number(node, "waiting")) is not None]
        waiting = sum(waits) / len(waits) if waits else 0.0
        bound = policy.next_bound(
            self._bound, self._plan.bound, waiting=waiting, loss=self._loss, loss_before=before
        )
        if bound != self._bound:
            why = "waiting dominates and the loss falls" if bound > self._bound else "the loss rises"
            numbers = {"before": self._bound, "bound": bound, "waiting": waiting}
            self._bound = bound
            yield Adjustment(what="bound", why=why, numbers=numbers, settings={"bound": bound})

    def _scale_rate(self, reports: Reports, workers: Mapping[int, int]) -> Iterator[Adjustment]:
        delay = reports.mean_delay()
        rate = policy.rate_by_delay(delay, len(workers), self._rate)
        if rate != self._rate:
            self._rate = rate
            yield Adjustment(
                what="rate",
                why="gradients are late by another number of updates than before",
                numbers={"delay": delay, "factor": self._factor},
                controls=(("scale", {"factor": self._factor}),),
            )

    def _evict(self, workers: Mapping[int, int]) -> Iterator[Adjustment]:
        slow = policy.hopeless(self._speeds)
        self._slow = Counter({rank: self._slow[rank] + 1 for rank in slow})
        for rank in [rank for rank in slow if self._slow[rank] >= SLOW_OBSERVATIONS]:
            speed = self._speeds.pop(rank)
            del self._slow[rank]
            yield Adjustment(
                what="evict",
                why=f"worker {rank} trains {speed:.3g} samples/s, far below the others",
                numbers={"rank": rank, "speed": speed},
                evict=workers[rank],
            )
