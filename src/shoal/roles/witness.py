"""Which part of a step failed, and which sample of it: what a process can say before it ends."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shoal.errors import InjectedFault, ShoalError
from shoal.feed.parts import Part, Piece
from shoal.observe.happenings import Raised
from shoal.strategies.gradients import task_loss
from shoal.strategies.replica import Replica

MOST_SAMPLES = 4096
"""Larger parts are not searched: others wait for this process's end."""


@dataclass(frozen=True)
class _Scene:
    """The part that is being computed."""

    slot: int
    samples: np.ndarray


class Witness:
    """Remembers which part this process computes, so that its failure can be traced to a sample."""

    def __init__(self, replica: Replica, read: Callable[[np.ndarray], Any]) -> None:
        self._replica = replica
        self._read = read
        self._scene: _Scene | None = None
        self.step = 0
        """The step that this process is at."""

    def watch(self, part: Part, samples: np.ndarray) -> Part:
        """The same part; while its batches are read and computed, it is known which it is."""

        def load() -> Iterator[Piece]:
            self._scene = _Scene(part.slot, samples)
            # Whoever takes the batches computes on each before it asks for the next, and for the end.
            yield from part.load()
            self._scene = None

        return replace(part, load=load)

    def testify(self, error: Exception) -> Raised:
        """What to tell about an error; the sample is None where no single one is to blame."""
        scene = self._scene
        return Raised(
            step=self.step,
            slot=None if scene is None else scene.slot,
            sample=None if scene is None else self._find_sample(scene.samples, type(error)),
            error=traceback.format_exception_only(error)[-1].strip(),
            # What Shoal itself refuses, it refuses everywhere.
            final=isinstance(error, ShoalError) and not isinstance(error, InjectedFault),
        )

    def _find_sample(self, samples: np.ndarray, kind: type[Exception]) -> int | None:
        """Halve what fails until one sample is left. This process computes nothing else any more."""
        self._replica.module.eval()  # BatchNorm takes no single samples while it trains
        if not 0 < len(samples) <= MOST_SAMPLES or not self._fails(samples, kind):
            return None
        while len(samples) > 1:
            halves = samples[: len(samples) // 2], samples[len(samples) // 2 :]
            guilty = [half for half in halves if self._fails(half, kind)]
            if not guilty:
                return None
            samples = guilty[0]
        return int(samples[0])

    @torch.no_grad()
    def _fails(self, samples: np.ndarray, kind: type[Exception]) -> bool:
        try:
            task_loss(self._replica, self._read(samples))
        except kind:
            return True
        except Exception:
            return False
        return False
