"""Events: what a run says about itself, and the bus that hands it to everyone who listens.

| kind         | values                                                                                      |
|--------------|---------------------------------------------------------------------------------------------|
| `world`      | workers, spares, slots, strategy, threads, text; where it varies places                     |
| `state`      | state (starting, ready, training, evaluating, saving, done), step                           |
| `beat`       | step, rss, phase, still, p99, gap: a sign of life; shown, never kept                        |
| `memory`     | peak_rss [[rank, bytes], …]: what is kept of the beats                                      |
| `steps`      | steps [[step, loss or null: not known], …], samples (trained so far), lr, total_steps,      |
|              | epoch; where there were any skipped [parts, weight]: of these steps, learnt already         |
| `progress`   | step, total_steps, samples: work without a loss, as prediction                              |
| `evaluation` | step, results {loss, …}                                                                     |
| `line`       | text, level: what a process printed or logged                                               |
| `warning`    | text                                                                                        |
| `fault`      | kind (kill, hang, slow, raise), role, rank, step, seconds, factor, always: one asked for    |
| `hung`       | role, rank, step, seconds, reason, where, stacks (a path): it is ended next                 |
| `lost`       | rank, reason, places; of a job with servers role and node                                   |
| `replaced`   | rank, seconds; places, hosts, and spare or by; of a job with servers role and node          |
| `restarted`  | reason, step (all begins again after it), samples, undone (steps), seconds (lost with them) |
| `resumed`    | step: the user goes on after it; as above, what was told of later steps is void             |
| `adopted`    | places, generation: a worker goes on with them                                              |
| `released`   | places, generation: a worker has let go of them                                             |
| `raised`     | step, slot, sample, error, final: why a worker of a job without servers failed              |
| `scaled`     | workers, before, hosts [[place, …], …], reason: the number of workers has changed           |
| `decision`   | text, and what the coordinator decided it by                                                |
| `cuts`       | from_step, sizes: samples of each slot from this step on, or null: even                     |
| `audit`      | samples, once, more_than_once, never, clean: the end; of a job with servers cells, shards   |
| `checkpoint` | step, path, digest, nbytes, seconds (to write), stall (seconds that training stood still)   |
| `saved`      | path, digest                                                                                |
| `failed`     | message, traceback                                                                          |
| `done`       | results, memory {host, gpu} (the most bytes held): one process is done                      |
| `finished`   | results, seconds, samples_per_s: the run is done                                            |
| `stopped`    | reason: the run ended before its time                                                       |
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from shoal.errors import ShoalError, SpecError


@dataclass(frozen=True)
class Event:
    """One thing that happened, as plain data."""

    kind: str
    rank: int | None = None
    """The global rank it is about; None where it is about the run."""
    values: dict[str, Any] = field(default_factory=dict)
    """Text, numbers, booleans, lists and dicts of these; the table above says which."""
    time: float = field(default_factory=time.time)
    """Seconds since 1970."""

    def to_json(self) -> str:
        """This event as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Event:
        """The event that `to_json` wrote."""
        try:
            return cls(**json.loads(text))
        except (TypeError, json.JSONDecodeError) as error:
            raise SpecError(f"Event: this is not an event written by Shoal ({error}).") from None


class Sink(Protocol):
    """Someone who reads events: a file, a terminal, a chart."""

    def handle(self, event: Event) -> None:
        """Take one event; quickly, for training waits."""

    def close(self) -> None:
        """Write what is left. Called once."""


class Bus:
    """Hands every event to every sink.

    Watching must not end what is watched: a sink that fails is dropped, the others get one warning. Only a
    `ShoalError` passes through: a sink raises it where going on is pointless, as in a folder that was removed.
    """

    def __init__(self, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = list(sinks)

    def emit(self, event: Event) -> None:
        """Hand `event` to all sinks."""
        for sink in list(self._sinks):
            try:
                sink.handle(event)
            except ShoalError:
                raise
            except Exception as error:
                self._drop(sink, error)

    def close(self) -> None:
        """Close all sinks, the last one first; none is left open because another failed."""
        fatal: ShoalError | None = None
        while self._sinks:
            sink = self._sinks.pop()
            try:
                sink.close()
            except ShoalError as error:
                fatal = fatal or error
            except Exception as error:
                self._warn(sink, error)
        if fatal is not None:
            raise fatal

    def _drop(self, sink: Sink, error: Exception) -> None:
        # A warning may itself have dropped this sink already.
        if sink in self._sinks:
            self._sinks.remove(sink)
            self._warn(sink, error)

    def _warn(self, sink: Sink, error: Exception) -> None:
        text = f"{type(sink).__name__} failed and is left out from here on: {type(error).__name__}: {error}"
        self.emit(Event("warning", values={"text": text}))
