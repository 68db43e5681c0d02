"""Rows of a large table through a key-value store, beside bare `index_select` and `index_add_` in one process.

`python -m benchmarks.kv_rows`: two workers of this host push to and pull from 1,000,000 x 64 floats, 4,096 random
rows at a time, with `dist_async`. The server is killed in the middle of every run, and what all have pushed must
be there in the end, as in a dense table. A push counts as one operation, and a pull as another.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import torch
import typer
from torch import Tensor

from shoal import kv

ROWS, COLUMNS, PART = 1_000_000, 64, 4096
WORKERS, WARM_UP = 2, 20
LEAST_PER_S, LEAST_SHARE = 400.0, 0.5
WORKER = "SHOAL_BENCH_KV_STEPS"
"""Set in processes that are workers."""


@dataclass(frozen=True, kw_only=True)
class RowSpeed:
    """Of one run."""

    per_s: float
    """Operations, of all workers together."""
    cpu_ms: float
    """Time of the processor for an operation: on a machine that others use, it tells more than the clock."""


def parts(worker: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What a worker pushes; whole numbers, so that the order of sums does not show."""
    generator = torch.Generator().manual_seed(worker)
    for _ in range(steps):
        rows = torch.randint(0, ROWS, (PART,), generator=generator)
        yield rows, torch.randint(-3, 4, (PART, COLUMNS), generator=generator).float()


def measure_bare(steps: int) -> RowSpeed:
    """In this process, without a store."""
    table, given = torch.zeros(ROWS, COLUMNS), list(parts(0, min(steps, 64)))
    table.add_(0)

    def turn(number: int) -> None:
        rows, values = given[number % len(given)]
        table.index_add_(0, rows, values)
        table.index_select(0, rows)

    return _clocked(turn, steps)


def _clocked(turn: Callable[[int], None], steps: int, end: Callable[[], None] = lambda: None) -> RowSpeed:
    for number in range(WARM_UP):
        turn(number)
    end()
    began, cpu = time.perf_counter(), time.process_time()
    for number in range(WARM_UP, steps):
        turn(number)
    end()
    operations = 2 * (steps - WARM_UP)
    taken, used = time.perf_counter() - began, time.process_time() - cpu
    return RowSpeed(per_s=operations / taken, cpu_ms=1000 * used / operations)


def work(steps: int) -> None:
    """One worker of a store; the first says whether the table is what it should be."""
    torch.set_num_threads(1)
    store = kv.create("dist_async", servers=1)
    store.init("table", torch.zeros(ROWS, COLUMNS))
    store.set_optimizer("sgd", lr=1.0)
    store.pull("table")
    given = list(parts(store.rank, steps))

    def turn(number: int) -> None:
        if store.servers is not None and number == steps // 2:
            os.kill(store.servers.pids[0], signal.SIGKILL)
        rows, values = given[number]
        store.row_sparse_push("table", rows, values)
        store.row_sparse_pull("table", rows)

    found = _clocked(turn, steps, store.barrier)
    print(json.dumps({"per_s": found.per_s, "cpu_ms": found.cpu_ms, "equal": _is_right(store, steps)}))
    store.close()


def _is_right(store: kv.KVStore, steps: int) -> bool:
    if store.rank:
        return True
    expected = torch.zeros(ROWS, COLUMNS)
    for worker in range(WORKERS):
        for rows, values in parts(worker, steps):
            expected.index_add_(0, rows, values, alpha=-1)
    return torch.equal(store.pull("table"), expected)


def measure_store(steps: int) -> RowSpeed:
    """In two workers and a server, which are new processes."""
    command = [sys.executable, "-m", "shoal.cli", "run", "-n", str(WORKERS), __file__]
    done = subprocess.run(
        command, env={**os.environ, WORKER: str(steps)}, stdout=subprocess.PIPE, text=True, check=True
    )
    found = [json.loads(line.partition("] ")[2]) for line in done.stdout.splitlines() if "per_s" in line]
    if len(found) != WORKERS or not all(one["equal"] for one in found):
        raise SystemExit(f"What was pushed is not what came of it: {done.stdout}")
    rates = [one["per_s"] for one in found]
    return RowSpeed(per_s=sum(rates), cpu_ms=sum(one["cpu_ms"] for one in found) / WORKERS)


def main(
    rounds: Annotated[int, typer.Option(help="Measure both so often, in turn.")] = 3,
    steps: Annotated[int, typer.Option(help="Pushes, and as many pulls, of each worker.", min=2 * WARM_UP)] = 400,
) -> None:
    """Measure, and hold the figures against their bars."""
    torch.set_num_threads(1)
    runs: dict[str, list[RowSpeed]] = {"one process, bare": [], f"{WORKERS} workers, kv": []}
    for _ in range(rounds):
        for (name, speeds), measure in zip(runs.items(), (measure_bare, measure_store), strict=True):
            speeds.append(measure(steps))
            print(f"{name:20} {speeds[-1].per_s:8.0f} operations/s {speeds[-1].cpu_ms:7.3f} ms of cpu each")
    bare, ours = (median(one.per_s for one in speeds) for speeds in runs.values())
    print(f"median {ours:.0f}/s (bar {LEAST_PER_S:.0f}), {ours / bare:.2f} of bare (bar {LEAST_SHARE})")
    if ours < LEAST_PER_S or ours / bare < LEAST_SHARE:
        raise SystemExit(1)


if __name__ == "__main__":
    if WORKER in os.environ:
        work(int(os.environ[WORKER]))
    else:
        typer.run(main)
