"""The peers: `python -m benchmarks.peers VARIANT MODEL` trains without Shoal and prints a `Measurement`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn, optim
from torch.nn.parallel import DistributedDataParallel

from benchmarks.fresh import module_command, surroundings
from benchmarks.measurement import Measurement, summarise
from benchmarks.models import WORKLOADS, Workload, warm_up_steps
from benchmarks.namespaces import CABLE
from benchmarks.straggler import STRAGGLERS, slowed
from benchmarks.variants import PEERS, Peer
from shoal.arena.malloc import keep_freed_memory

PEER_TIMEOUT = timedelta(seconds=60)
"""How long a rank waits for another; torch's own half an hour would keep a failed benchmark waiting."""


def timed_steps(
    workload: Workload, model: nn.Module, optimizer: optim.Optimizer, *, rank: int, steps: int
) -> tuple[list[float], float, float]:
    """A plain training loop: the times of its steps after the warm-up, the last loss, and when it ended."""
    warmup = warm_up_steps(steps)
    times_s: list[float] = []
    loss = torch.tensor(float("nan"))
    for step in range(warmup + steps):
        begin = time.perf_counter()
        inputs, target = workload.batch(rank, step)
        optimizer.zero_grad()
        loss = workload.loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        times_s.append(time.perf_counter() - begin)
    return times_s[warmup:], loss.item(), time.time()


def run_single(workload: Workload, peer: Peer, steps: int) -> tuple[list[float], float, float]:
    """One process, as one writes it by hand."""
    model = workload.model()
    optimizer = workload.optimizer(model.parameters(), fused=_fused(peer))
    return timed_steps(workload, model, optimizer, rank=0, steps=steps)


def run_ddp_rank(
    workload: Workload,
    peer: Peer,
    steps: int,
    *,
    rank: int,
    processes: int,
    store: Path,
    straggler: str | None = None,
) -> tuple[list[float], float, float]:
    """One of several processes under torch's DDP."""
    # A file and not a port: torch's TCP store would listen on every interface of the machine.
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=processes, timeout=PEER_TIMEOUT
    )
    try:
        own = workload.model()
        if straggler is not None:
            own = slowed(own, straggler, rank=rank, processes=processes)
        model = DistributedDataParallel(own, gradient_as_bucket_view=peer.tuned)
        optimizer = workload.optimizer(model.parameters(), fused=_fused(peer))
        result = timed_steps(workload, model, optimizer, rank=rank, steps=steps)
        distributed.barrier()
        return result
    finally:
        distributed.destroy_process_group()


def _fused(peer: Peer) -> bool | None:
    return True if peer.tuned else None


def start_ddp(argv: Sequence[str], processes: int, namespaces: Sequence[str] = ()) -> int:
    """Start one process per rank and wait for all; the first one prints. Returns the worst exit status.

    `namespaces`: of the network, among which ranks are spread in blocks."""
    environment = surroundings(GLOO_SOCKET_IFNAME=CABLE if namespaces else "lo")
    with tempfile.TemporaryDirectory() as folder:
        command = module_command("peers", *argv, "--store", str(Path(folder, "store")))
        ranks = []
        for rank in range(processes):
            enter = ["ip", "netns", "exec", namespaces[rank * len(namespaces) // processes]] if namespaces else []
            ranks.append(subprocess.Popen([*enter, *command, "--rank", str(rank)], env=environment))
        try:
            # A rank whose peer died fails too, at the latest after PEER_TIMEOUT.
            return max(abs(process.wait()) for process in ranks)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                    process.wait()


def measure(arguments: argparse.Namespace) -> Measurement:
    """Run what the arguments ask for, in this process."""
    workload, peer = WORKLOADS[arguments.model](), PEERS[arguments.variant]
    torch.set_num_threads(1)
    if peer.tuned:
        keep_freed_memory()
    steps = arguments.steps or workload.steps
    processes = arguments.processes if peer.distributed else 1
    if peer.distributed:
        times_s, loss, ended_at = run_ddp_rank(
            workload,
            peer,
            steps,
            rank=arguments.rank,
            processes=processes,
            store=arguments.store,
            straggler=arguments.straggler,
        )
    else:
        times_s, loss, ended_at = run_single(workload, peer, steps)
    return summarise(
        variant=arguments.variant,
        model=workload.name,
        processes=processes,
        batch_per_process=workload.batch_per_process,
        step_times_s=times_s,
        loss=loss,
        ended_at=ended_at,
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("variant", choices=PEERS)
    parser.add_argument("model", choices=WORKLOADS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, help="measured steps; default the model's own number")
    parser.add_argument("--straggler", choices=STRAGGLERS, help="slow the last rank down, or each in turn")
    parser.add_argument("--namespaces", help="run them in these network namespaces, with commas")
    parser.add_argument("--rank", type=int, help="set for the processes that this one starts")
    parser.add_argument("--store", type=Path, help="the file through which they find each other")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure one peer and print one line; returns the exit status."""
    arguments = parse(argv)
    if PEERS[arguments.variant].distributed and arguments.rank is None:
        inside = arguments.namespaces.split(",") if arguments.namespaces else []
        return start_ddp(argv, arguments.processes, inside)
    measurement = measure(arguments)
    if not arguments.rank:
        print(measurement.to_json(), flush=True)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # Without the interpreter's own farewell: a gloo thread that still drops a tensor then aborts the process.
    os._exit(status)
