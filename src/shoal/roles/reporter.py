"""What a worker tells the supervisor, and what it is told."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal.comm.channel import Channel
from shoal.spec import World
from shoal.strategies.base import StepResult

_REPORT_EVERY_S = 0.1
_TIMELINE_STEPS = 10_000


class Reporter:
    """Tells the supervisor how the run goes; the first worker speaks for all about the loss."""

    def __init__(self, world: World, channel: Channel, clock: Callable[[], float] = time.monotonic) -> None:
        self._world = world
        self._channel = channel
        self._clock = clock
        self._told_at = clock()
        self._asked_at = 0.0
        self._stop = False
        self._steps: list[tuple[int, float]] = []
        self._latest: dict[str, Any] = {}
        self.step = 0
        self.total_steps = 0
        self.timeline: deque[tuple[float, int]] = deque(maxlen=_TIMELINE_STEPS)
        """At the latest steps: a time of this host's clock, and the samples of the whole run committed by then."""

    def send(self, message: dict[str, Any]) -> None:
        self._channel.send(message)

    def line(self, text: str) -> None:
        self.send({"kind": "line", "text": text, "level": "info"})

    def on_state(self, state: str, step: int) -> None:
        self.send({"kind": "state", "state": state, "step": step})

    def on_step(
        self,
        step: int,
        result: StepResult,
        samples: int,
        learning_rate: float,
        epoch: int,
        *,
        committed: int | None = None,
    ) -> None:
        """A step is done; `committed`: the samples of all workers, where they do not go in step with this one."""
        self.step = step
        if not self._world.is_first:
            return
        now = self._clock()
        self.timeline.append((now, samples if committed is None else committed))
        self._steps.append((step, result.loss))
        self._latest = {"samples": samples, "lr": learning_rate, "epoch": epoch + 1}
        if now - self._told_at > _REPORT_EVERY_S or step == 1:
            self._told_at = now
            self.flush()

    def on_progress(self, step: int, samples: int) -> None:
        """A batch of work without a loss is done (prediction)."""
        self.step = step
        now = self._clock()
        if now - self._told_at > _REPORT_EVERY_S or step == self.total_steps:
            self._told_at = now
            self.send({"kind": "progress", "step": step, "total_steps": self.total_steps, "samples": samples})

    def flush(self) -> None:
        """Send the steps that were not told yet."""
        if self._steps:
            self.send({"kind": "steps", "steps": self._steps, "total_steps": self.total_steps, **self._latest})
            self._steps = []

    def on_evaluation(self, step: int, results: dict[str, float]) -> None:
        if self._world.is_first:
            self.flush()
            self.send({"kind": "evaluation", "step": step, "results": results})

    def wants_stop(self) -> bool:
        now = self._clock()
        if not self._stop and now - self._asked_at > _REPORT_EVERY_S / 2:
            self._asked_at = now
            message = self._channel.poll()
            self._stop = message is not None and message["kind"] == "stop"
        return self._stop

    def wait_for_place(self, world: World) -> World:
        """A spare's life: wait until a worker's place is free, or the run is over."""
        while True:
            message = self._channel.receive(3600.0)
            if message is None:
                continue
            if message["kind"] == "stop":
                raise SystemExit(0)
            if message["kind"] == "takeover":
                self._world = replace(
                    world,
                    role="worker",
                    global_rank=message["rank"],
                    local_rank=message["rank"],
                    generation=message["generation"],
                )
                return self._world

    def done(self, results: dict[str, Any]) -> None:
        self.on_state("done", self.step)
        self.send({"kind": "done", "results": results})
