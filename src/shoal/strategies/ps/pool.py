"""Gradients gathered by threads of one worker, and pushed by time or by count."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shoal.feed.parts import LoadedBatch
from shoal.spec.update_path import Pooling
from shoal.step.compute import Sums, backward_part
from shoal.step.work import Work
from shoal.strategies.ps.client import PsClient
from shoal.strategies.ps.contributions import Computed, MakeWork, computed, contribution_of
from shoal.strategies.ps.served import Served

_LOOK_S = 0.005
"""How long threads may work, or cells be missing, before this worker's messages are looked at."""

Load = Callable[[], Iterator[LoadedBatch]]


class PoolMaker:
    """Takes cells one by one and lets threads differentiate them at the same time; one push for all of a round.

    The threads share the module, its parameters and its buffers. With more than one, random numbers (dropout,
    augmentation) are drawn by whoever comes first and not keyed by the cell, gradients are added in the order in
    which they are done, and moving buffers (BatchNorm's statistics) may miss the one or other batch.
    """

    def __init__(self, served: Served, client: PsClient, make_work: MakeWork, pooling: Pooling) -> None:
        self._served = served
        self._client = client
        self._make_work = make_work
        self._pooling = pooling
        assert client.machine.leases is not None
        self._leases = client.machine.leases
        self._threads = ThreadPoolExecutor(pooling.threads, thread_name_prefix="shoal-pool")
        self._reading = threading.Lock()
        """Data sets are seldom made for several threads."""
        self._unpushed: list[int] = []
        """Cells of a round that failed: they are this worker's to do."""

    def __call__(self, clock: int, cells: Sequence[int], slot: int) -> Computed:
        buffer = self._client.aim(slot, clock)
        total = GradientSum(self._client.views(buffer), self._served.memory.touched(buffer).numpy())
        first = deque(dict.fromkeys([*cells, *self._unpushed]))
        self._unpushed = []
        self._gather(first, total)
        taken = sorted(self._unpushed)
        self._client.push(contribution_of(total.sums, clock=clock, cells=taken, buffer=buffer, scaled=False))
        self._unpushed = []
        return computed(total.sums, taken)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _gather(self, first: deque[int], total: GradientSum) -> None:
        """Keep the threads busy until enough gradients are in, or it is time."""
        pooling, running = self._pooling, set[Future[None]]()
        ends_at = time.monotonic() + pooling.ms / 1000 if pooling.ms else float("inf")
        try:
            while True:
                is_full = len(self._unpushed) >= pooling.count or self._leases.is_closed(self._unpushed)
                wants_more = bool(first) or (not is_full and time.monotonic() < ends_at)
                if wants_more and len(running) < pooling.threads:
                    cell = first.popleft() if first else self._leases.take(time.monotonic())
                    if cell is not None:
                        self._unpushed.append(cell)
                        running.add(self._threads.submit(self._differentiate, cell, total))
                        continue
                    wants_more = not (self._leases.is_over or self._leases.is_dry)
                if not running and not wants_more:
                    return
                running = self._await_some(running)
        finally:
            wait(running)
            self._unpushed.extend(first)

    def _await_some(self, running: set[Future[None]]) -> set[Future[None]]:
        """Those that still work; what went wrong in one of the others is raised."""
        done, running = wait(running, _LOOK_S, FIRST_COMPLETED)
        for future in done:
            future.result()
        self._client.hear(0.0 if done or running else _LOOK_S)
        return running

    def _differentiate(self, cell: int, total: GradientSum) -> None:
        """In a thread: one cell's gradient, weighted by its samples. The tap's hooks have no part in it."""
        step, slot = divmod(cell, self._served.rules.slots)
        work: Work = self._make_work(step + 1, range(slot, slot + 1), apart=True)
        part = replace(work.parts[0], load=partial(self._read, work.parts[0].load), total_weight=None)
        params = self._served.memory.params

        def backward(loss: torch.Tensor, share: torch.Tensor | None) -> None:
            total.add(torch.autograd.grad(loss, params, share, allow_unused=True))

        sums = backward_part(self._served.replica, work, part, backward)
        total.count(sums)

    def _read(self, load: Load) -> Iterator[LoadedBatch]:
        batches = load()
        while True:
            with self._reading:
                batch = next(batches, None)
            if batch is None:
                return
            yield batch


class GradientSum:
    """What the threads of a round have added up; `views` and `touched` are a buffer's."""

    def __init__(self, views: Sequence[torch.Tensor], touched: Any) -> None:
        self.sums = Sums()
        self._views = views
        self._touched = touched
        self._lock = threading.Lock()

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add a gradient; None for parameters that have none."""
        with self._lock:
            for number, gradient in enumerate(gradients):
                if gradient is None:
                    continue
                dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
                if self._touched[number]:
                    self._views[number].add_(dense)
                else:
                    self._views[number].copy_(dense)
                    self._touched[number] = 1

    def count(self, sums: Sums) -> None:
        """Count what a cell's passes came to."""
        with self._lock:
            self.sums += sums
