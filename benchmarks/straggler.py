"""Slow workers, for benchmarks that ask who waits for them.

A slow worker sleeps in each step, so that it takes no processor time from the others; how long follows from its
own forward pass, so that it is the same share of a step under every strategy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import nn

from shoal.errors import unknown

SLOWDOWN = 4
"""A slow step takes so many times the computing of another one."""
STEP_PER_FORWARD = 3.5
"""Forward and backward over forward, as measured on the benchmark's MLP alone: in a run the backward pass is not
timed, for it may contain waits for others."""
TURN_STEPS = 3
"""An alternating slow-down moves on to the next worker after so many steps."""

IsSlow = Callable[[int, int, int], bool]
"""`(rank, processes, step) -> bool`; a worker counts its own steps."""

STRAGGLERS: dict[str, IsSlow] = {
    "lasting": lambda rank, processes, step: rank == processes - 1,
    "alternating": lambda rank, processes, step: step // TURN_STEPS % processes == rank,
}
"""The last worker all the time, or each worker in turn."""


def slowed(model: nn.Module, straggler: str, *, rank: int, processes: int) -> nn.Module:
    """Make this process's `model` train as slowly as the named straggler does; evaluation stays as it is."""
    if straggler not in STRAGGLERS:
        raise unknown("bench: straggler", straggler, STRAGGLERS)
    brake = _Brake(STRAGGLERS[straggler], rank, processes)
    model.register_forward_pre_hook(brake.before_forward)
    model.register_forward_hook(brake.after_forward)
    return model


class _Brake:
    """Times a forward pass and sleeps behind it, in the steps in which this worker is slow."""

    def __init__(self, is_slow: IsSlow, rank: int, processes: int) -> None:
        self._is_slow, self._rank, self._processes = is_slow, rank, processes
        self._step = 0
        self._began_s = 0.0

    def before_forward(self, model: nn.Module, inputs: Any) -> None:
        # Processor time: what the machine's other users take is not this worker's computing.
        self._began_s = time.thread_time()

    def after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if not model.training:
            return
        if self._is_slow(self._rank, self._processes, self._step):
            compute_s = STEP_PER_FORWARD * (time.thread_time() - self._began_s)
            time.sleep((SLOWDOWN - 1) * compute_s)
        self._step += 1
