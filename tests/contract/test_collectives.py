"""Collectives: the same bits on every rank, whatever the length, the type, the world and the wire."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from helpers.scripts import run_as_main
from shoal.comm.collectives import COLLECTIVES, Collective, make_collective
from shoal.comm.memory_transport import Faults, MemoryNetwork
from shoal.comm.security import RunKey
from shoal.comm.transport import Transport
from shoal.comm.zmq_transport import ZmqTransport
from shoal.errors import CommTimeout, PeerLost, ProtocolError, SpecError

HANG_GUARD_S = 60.0
NAMES = sorted(COLLECTIVES)


def in_threads(transports: list[Transport], work: Callable[[Transport], object]) -> list[object]:
    """Run `work` once per transport, each in a thread; an exception counts as that rank's result."""

    def run(transport: Transport) -> object:
        try:
            with transport:
                return work(transport)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(transports)) as pool:
        return list(pool.map(run, transports, timeout=HANG_GUARD_S))


def memory(size: int, faults: Faults | None = None) -> list[Transport]:
    network = MemoryNetwork(size, faults=faults)
    return [network.transport(rank) for rank in range(size)]


def tcp(size: int) -> list[Transport]:
    key = RunKey.create()
    transports = [ZmqTransport(rank, key=key) for rank in range(size)]
    for transport in transports:
        transport.connect({other.rank: other.address for other in transports})
    return transports


def small_chunks(name: str, transport: Transport, size: int) -> Collective:
    """Chunks of 64 bytes, so that short tensors have many."""
    return COLLECTIVES[name](transport, transport.rank, size, timeout_s=20.0, chunk_bytes=64)


def contribution(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def assert_sums(results: list[object], numel: int, dtype: torch.dtype = torch.float32) -> None:
    for result in results:
        assert isinstance(result, torch.Tensor), result
        assert result.dtype == dtype and torch.equal(result, results[0])
    exact = sum(contribution(rank, numel, dtype).double() for rank in range(len(results)))
    tolerance = 4 * len(results) * torch.finfo(dtype).eps
    torch.testing.assert_close(results[0].double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_ranks_get_the_same_sum_at_any_length(name, size):
    lengths = [0, 1, size - 1, size, 17, 503]

    def work(transport: Transport) -> list[torch.Tensor]:
        collective = small_chunks(name, transport, size)
        tensors = [contribution(transport.rank, numel) for numel in lengths]
        for tensor in tensors:
            collective.allreduce_(tensor)
        return tensors

    results = in_threads(memory(size), work)
    assert not [result for result in results if isinstance(result, Exception)]
    for index, numel in enumerate(lengths):
        assert_sums([result[index] for result in results], numel)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types(name, dtype):
    def work(transport: Transport) -> torch.Tensor:
        tensor = contribution(transport.rank, 100, dtype)
        small_chunks(name, transport, 3).allreduce_(tensor)
        return tensor

    assert_sums(in_threads(memory(3), work), 100, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_a_lossy_wire_changes_no_bit(name):
    faults = Faults(drop=0.05, delay=0.1, duplicate=0.05, corrupt=0.05, seed=11)
    network = MemoryNetwork(3, faults=faults)

    def work(transport: Transport) -> torch.Tensor:
        tensor = contribution(transport.rank, 400)
        collective = small_chunks(name, transport, 3)
        collective.allreduce_(tensor)
        collective.broadcast_(torch.zeros(50))
        return tensor

    results = in_threads([network.transport(rank) for rank in range(3)], work)
    assert_sums(results, 400)
    assert min(network.injected[fault] for fault in ("drop", "delay", "duplicate", "corrupt")) > 0


@pytest.mark.parametrize("name", ["central", "allgather"])
def test_sums_run_in_rank_order(name):
    values = [1e8, 1.0, -1e8]

    def work(transport: Transport) -> torch.Tensor:
        tensor = torch.tensor([values[transport.rank]])
        make_collective(name, transport, transport.rank, 3).allreduce_(tensor)
        return tensor

    in_order = torch.tensor([values[0]]) + values[1] + values[2]
    assert in_threads(memory(3), work) == [in_order] * 3


@pytest.mark.parametrize("name", NAMES)
def test_over_tcp_with_memory_reused_at_once(name):
    def work(transport: Transport) -> torch.Tensor:
        collective = make_collective(name, transport, transport.rank, 3, timeout_s=20.0)
        tensor = torch.empty(700_000)
        for _ in range(3):
            tensor.copy_(contribution(transport.rank, 700_000))
            collective.allreduce_(tensor)
            result = tensor.clone()
            tensor.fill_(float("nan"))
        assert transport.counters.refused == 0
        return result

    assert_sums(in_threads(tcp(3), work), 700_000)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_broadcast(size):
    def work(transport: Transport) -> torch.Tensor:
        tensor = contribution(transport.rank, 333)
        small_chunks("ring", transport, size).broadcast_(tensor)
        return tensor

    for result in in_threads(memory(size), work):
        assert torch.equal(result, contribution(0, 333))


@pytest.mark.parametrize("root", [0, 2])
def test_a_sum_at_one_rank_runs_in_rank_order_whoever_that_is(root):
    values = [1e8, 1.0, -1e8]

    def work(transport: Transport) -> torch.Tensor:
        tensor = torch.full((100,), values[transport.rank])
        small_chunks("central", transport, 3).reduce_(tensor, root)
        return tensor

    in_order = torch.tensor(values[0]) + values[1] + values[2]
    expected = [in_order if rank == root else torch.tensor(value) for rank, value in enumerate(values)]
    assert [result.unique() for result in in_threads(memory(3), work)] == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("odd", [torch.zeros(9), torch.zeros(0), torch.zeros(10, dtype=torch.float64)])
def test_ranks_that_disagree_all_raise(name, odd):
    def work(transport: Transport) -> None:
        tensor = odd.clone() if transport.rank == 2 else torch.zeros(10)
        small_chunks(name, transport, 4).allreduce_(tensor)

    results = in_threads(memory(4), work)
    assert all(isinstance(result, ProtocolError | PeerLost) for result in results), results
    assert any("all ranks must do the same" in str(result) for result in results)
    assert not any(isinstance(result, CommTimeout) for result in results)


def test_two_ranks_that_disagree_are_both_told_how():
    def work(transport: Transport) -> None:
        collective = make_collective("ring", transport, transport.rank, 2)
        with pytest.raises(ProtocolError, match=r"10 float32.*11 float32|11 float32.*10 float32"):
            collective.allreduce_(torch.zeros(10 + transport.rank))
        with pytest.raises(ProtocolError, match="an earlier one failed"):
            collective.allreduce_(torch.zeros(10))

    assert in_threads(memory(2), work) == [None, None]


def test_tensors_that_cannot_be_summed_say_why():
    collective = make_collective("ring", MemoryNetwork(1).transport(0), 0, 1)
    for tensor in (torch.zeros(2, 2), torch.zeros(4)[::2]):
        with pytest.raises(SpecError, match="flat, contiguous"):
            collective.allreduce_(tensor)
    with pytest.raises(SpecError, match="floating"):
        collective.allreduce_(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(SpecError, match="Choose one of: allgather, central, ring, tree"):
        make_collective("rong", MemoryNetwork(1).transport(0), 0, 1)


PROCESSES = """
import multiprocessing, os, signal, torch
from shoal.comm.collectives import make_collective
from shoal.comm.security import RunKey
from shoal.comm.zmq_transport import ZmqTransport
from shoal.errors import PeerLost

key = RunKey.create()

def work(rank, pipe):
    torch.set_num_threads(1)
    transport = ZmqTransport(rank, key=key)
    pipe.send(transport.address)
    transport.connect(dict(enumerate(pipe.recv())))
    collective = make_collective("ring", transport, rank, 3)
    tensor = torch.full((1_000_001,), float(rank + 1))
    collective.allreduce_(tensor)
    pipe.send(bool(torch.all(tensor == 6)))
    pipe.recv()  # all are done with the first sum
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        collective.allreduce_(tensor)
    except PeerLost as loss:
        pipe.send(loss.peer)
    pipe.recv()  # all have reported; leaving earlier would be another loss
    transport.abort()

fork = multiprocessing.get_context("fork")
pipes, workers = [], []
for rank in range(3):
    here, there = fork.Pipe()
    workers.append(fork.Process(target=work, args=(rank, there), daemon=True))
    workers[-1].start()
    pipes.append(here)
roster = [pipe.recv() for pipe in pipes]
for pipe in pipes:
    pipe.send(roster)
print("sums", *(pipe.recv() for pipe in pipes))
for pipe in pipes:
    pipe.send("go on")
print("lost", *(pipe.recv() for pipe in pipes[:2]))
for pipe in pipes[:2]:
    pipe.send("leave")
for worker in workers:
    worker.join()
"""


def test_real_processes_sum_and_notice_a_kill(tmp_path, zygote):
    (tmp_path / "processes.py").write_text(PROCESSES)
    done = run_as_main(tmp_path / "processes.py", folder=tmp_path, zygote=zygote)
    assert done.stdout.split() == ["sums", "True", "True", "True", "lost", "2", "2"], done.stderr
