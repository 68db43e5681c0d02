"""Loading parts of batches before their step asks for them, in a thread of its own."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from shoal.feed.parts import LoadedBatch

Loaded = list[LoadedBatch]
"""The batches of a part."""

_OBSERVED_LOADS = 3
_WORTHWHILE_S = 5e-4
"""A load that is quicker than this costs less than handing it to a thread."""
_IDLE_TAKES = 16
"""So often in a row must the loader have been done before it is given less room."""


@dataclass(frozen=True, eq=False)
class WantedPart:
    """A part that some step will ask for."""

    step: int
    slot: int
    samples: np.ndarray
    key: int
    """Of the random numbers that are drawn while it is loaded."""

    @property
    def name(self) -> tuple[int, int, bytes]:
        """What tells parts apart: a slot may hold other samples by the time its step comes."""
        return self.step, self.slot, self.samples.tobytes()


class RandomWatch:
    """Watches a few loads: do they take long, and who draws random numbers, they or what runs between them?

    A thread beside the model can load the same bits only where the two share no random generator. Loads find
    Python's and numpy's freshly seeded; torch's is seeded for the model and the load together.
    """

    def __init__(self) -> None:
        self._observed = 0
        self._shares_generator = False
        self._shortest_s = float("inf")
        self._left: object = None

    @property
    def is_done(self) -> bool:
        """Whether enough was seen."""
        return self._observed >= _OBSERVED_LOADS

    @property
    def allows_thread(self) -> bool:
        """Whether loading in a thread gives the same bits, and is worth it."""
        return self.is_done and not self._shares_generator and self._shortest_s >= _WORTHWHILE_S

    def before_seeding(self) -> None:
        """A part is about to be loaded: what ran since the last one may have drawn numbers."""
        if self._left is not None and self._left != _generators_of_python():
            self._shares_generator = True

    @contextmanager
    def load(self) -> Iterator[None]:
        """Around each load."""
        before, begun = torch.default_generator.get_state(), time.perf_counter()
        yield
        self._shortest_s = min(self._shortest_s, time.perf_counter() - begun)
        if not torch.equal(before, torch.default_generator.get_state()):
            self._shares_generator = True
        self._left = _generators_of_python()
        self._observed += 1


def _generators_of_python() -> object:
    _, keys, position, *_ = np.random.get_state()
    return random.getstate(), np.asarray(keys).tobytes(), position


class Ahead:
    """Loads what is foreseen, in order, as far ahead as the loader needs to keep up.

    The room grows by one part whenever a step has to wait for its data, and shrinks when the loader has been
    done long before for a while.
    """

    def __init__(self, load: Callable[[WantedPart], Loaded], most: int) -> None:
        self.depth = 1
        """Parts that may lie ready."""
        self.waits = 0
        """How often a step had to wait for its data."""
        self._load = load
        self._most = most
        self._idle = 0
        self._plan: Iterator[WantedPart] = iter(())
        self._ready: dict[tuple[int, int, bytes], Loaded | BaseException] = {}
        self._taken: set[tuple[int, int, bytes]] = set()
        self._current: tuple[int, int, bytes] | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="shoal-prefetch", daemon=True)
        self._thread.start()

    def foresee(self, coming: Iterable[WantedPart], since: int) -> None:
        """What will be asked for, in this order; parts of steps before `since` will not."""
        with self._changed:
            self._plan = iter(coming)
            self._taken.clear()
            for name in [name for name in self._ready if name[0] < since]:
                del self._ready[name]
            self._changed.notify_all()

    def take(self, wanted: WantedPart) -> Loaded:
        """The part, loaded before, or now where it was not foreseen."""
        name = wanted.name
        with self._changed:
            self._adapt(waits=name not in self._ready)
            self._taken.add(name)
            self._changed.wait_for(lambda: self._current != name)
            found = self._ready.pop(name, None)
            self._changed.notify_all()
        if found is None:
            return self._load(wanted)
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """Load no more; returns once the load under way is over."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _adapt(self, *, waits: bool) -> None:
        was_full = len(self._ready) >= self.depth
        self._idle = self._idle + 1 if was_full and not waits else 0
        if waits:
            self.waits += 1
            self.depth = min(self.depth + 1, self._most)
        elif self._idle >= _IDLE_TAKES:
            self._idle = 0
            self.depth = max(self.depth - 1, 1)

    def _run(self) -> None:
        while (wanted := self._next()) is not None:
            result: Loaded | BaseException
            try:
                result = self._load(wanted)
            except BaseException as error:  # raised where the part is asked for
                result = error
            with self._changed:
                self._ready[wanted.name] = result
                self._current = None
                self._changed.notify_all()

    def _next(self) -> WantedPart | None:
        """Wait until there is room and something to load; None when it is over."""
        with self._changed:
            while not self._is_closed:
                if len(self._ready) < self.depth and (wanted := self._next_planned()) is not None:
                    if wanted.name in self._ready or wanted.name in self._taken:
                        continue
                    self._current = wanted.name
                    return wanted
                self._changed.wait()
        return None

    def _next_planned(self) -> WantedPart | None:
        try:
            return next(self._plan, None)
        except Exception:  # a sampler of the user's: the step that it is for will meet the same error
            return None
