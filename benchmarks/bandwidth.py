"""How fast a model's bytes travel, beside the fastest way there is: memcpy on one host, bare ZeroMQ over tcp.

`python -m benchmarks.bandwidth` measures in a process that has a worker's settings. A server's update is no part
of it: pushes go to a process that only acknowledges them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from benchmarks.bars import Bar, BarVerdict
from benchmarks.fresh import module_command, surroundings
from shoal.bench.laps import rotated
from shoal.errors import LaunchError

if TYPE_CHECKING:
    from shoal.ps.messages import Push
    from shoal.strategies.ps.served import Served

MODEL = "mlp"
BARS = (
    Bar(MODEL, "pull, same host", "memcpy", 0.6),
    Bar(MODEL, "push, same host", "memcpy", 0.6),
    Bar(MODEL, "push, tcp with checksums", "bare ZeroMQ", 0.75),
)
TIMEOUT_S = 300
LEAST_ROUNDS = 25
"""A round takes a fraction of a second, and single ones differ much."""

Way = Callable[[], None]
"""Moves the whole model's bytes once."""


def measure_bandwidth(
    rounds: int, on_measured: Callable[[str, float], None] = lambda name, bytes_per_s: None
) -> list[BarVerdict]:
    """Every way beside its yardstick, in a fresh process; `on_measured` is told each way's median."""
    command = module_command("bandwidth", "--rounds", str(max(rounds, LEAST_ROUNDS)))
    answer = subprocess.run(
        command, env=surroundings(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if answer.returncode:
        last = "\n".join(answer.stderr.strip().splitlines()[-15:])
        raise LaunchError(f"bench: `{' '.join(command)}` failed; it said:\n{last}")
    speeds: dict[str, list[float]] = json.loads(answer.stdout)
    for name, found in speeds.items():
        on_measured(name, statistics.median(found))
    pairs = [(bar, zip(speeds[bar.subject], speeds[bar.peer], strict=True)) for bar in BARS]
    return [BarVerdict(bar=bar, ratios=tuple(ours / theirs for ours, theirs in both)) for bar, both in pairs]


def speeds_of(ways: dict[str, Way], nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Bytes per second of each way, one number per round; all ways take turns."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, rounds):
        for name in rotated(list(ways), turn):
            begin = time.perf_counter()
            ways[name]()
            if turn >= 0:  # The first touch of memory and the first packet are not counted.
                speeds[name].append(nbytes / (time.perf_counter() - begin))
    return speeds


def open_model(model: str = MODEL) -> Served:
    """A model of the benchmark as a worker of one host sees it, with the servers' copy in the segment."""
    from benchmarks.tasks import task
    from shoal.model.replica import Replica
    from shoal.spec import ParameterServer, World
    from shoal.strategies.ps.served import Served

    served = Served.open(ParameterServer(), Replica(task(model)), World(), slots=1, workers=1)
    for shard in range(len(served.memory.blocks)):
        served.make_values(shard, 0).initialise()
    return served


def pull_way(served: Served) -> Way:
    """Copies all shards out of the segment, guarded by versions."""
    from shoal.strategies.ps.puller import OwnValues, SharedFetch, Whereabouts

    first_copies = Whereabouts(copy_of=lambda shard: 0, updates_of=lambda shard: 0, hear=lambda: None)
    fetch = SharedFetch(served.memory, OwnValues(served.memory, served.moving), first_copies)
    places = [(shard, place) for shard, blocks in enumerate(served.memory.blocks) for place in range(len(blocks))]

    def pull() -> None:
        for shard, place in places:
            fetch.fetch_block(shard, place)

    return pull


def push_way(served: Served, send: Callable[[Sequence[Push]], None]) -> Way:
    """Copies a gradient into the segment and tells of it, until that is acknowledged."""
    import torch

    views = served.memory.views("gradients/0")
    gradients = [torch.ones_like(param) for param in served.memory.params]
    messages = pushes(served, with_frames=False)

    def push() -> None:
        for view, gradient in zip(views, gradients, strict=True):
            view.copy_(gradient)
        send(messages)

    return push


def memcpy_way(nbytes: int) -> Way:
    """The C library's own, between two plain buffers."""
    source, target = (ctypes.create_string_buffer(nbytes) for _ in range(2))
    # Pages that were never written all lie in the same place: reading them costs next to nothing.
    ctypes.memset(source, 1, nbytes)

    def copy() -> None:
        ctypes.memmove(target, source, nbytes)

    return copy


def pushes(served: Served, *, with_frames: bool) -> list[Push]:
    """One push per shard, with the gradient in the frames that carry it over tcp, or with none."""
    from shoal.comm.compression import make_compression
    from shoal.ps.messages import Push
    from shoal.strategies.ps.parcelling import parcels

    compression = make_compression(served.spec.compress)
    return [
        Push(
            shard=shard,
            generation=1,
            origin=1,
            sequence=1,
            clock_of=0,
            clock=1,
            cells=[0],
            based_on=0,
            weight=1.0,
            loss=1.0,
            frames=tuple(parcels(served.memory, shard, "gradients/0", compression)) if with_frames else (),
        )
        for shard in range(len(served.memory.blocks))
    ]


def measure(rounds: int) -> dict[str, list[float]]:
    """Measure all ways in this process."""
    import torch

    from benchmarks.receiver import BareSender, ShoalSender
    from shoal.arena import keep_freed_memory
    from shoal.ps.node import encode_bundle

    torch.set_num_threads(1)
    keep_freed_memory()
    served = open_model()
    nbytes = sum(block.chunk.nbytes for blocks in served.memory.blocks for block in blocks)
    framed = pushes(served, with_frames=True)
    # Built once: what is compared with is sockets alone.
    packets = [encode_bundle(1, [push]) for push in framed]
    with ExitStack() as stack:
        shoal, bare = stack.enter_context(ShoalSender()), stack.enter_context(BareSender())
        same_host = {
            "memcpy": memcpy_way(nbytes),
            "pull, same host": pull_way(served),
            "push, same host": push_way(served, shoal.send),
        }
        tcp = {
            "bare ZeroMQ": lambda: bare.send(packets),
            "push, tcp with checksums": lambda: shoal.send(framed),
        }
        return {**speeds_of(same_host, nbytes, rounds), **speeds_of(tcp, nbytes, rounds)}


def main(argv: Sequence[str]) -> None:
    """Print the bytes per second of every way as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS)
    print(json.dumps(measure(parser.parse_args(argv).rounds)))


if __name__ == "__main__":
    main(sys.argv[1:])
